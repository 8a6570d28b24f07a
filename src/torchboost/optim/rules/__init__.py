"""The optimizers: one file per update rule."""
