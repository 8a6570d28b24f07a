"""What looks at a model: data flow, blocks, surgery, norm roles, folding."""
