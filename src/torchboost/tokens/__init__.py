"""Tensors of a padded batch of which only some positions are computed."""
