"""Analysis and surgery of models: data flow, blocks, replacement of modules, norm roles, folding."""
