"""The frozen front of a model: found, built, and its activations cached."""
