"""torchboost: faster training of PyTorch models within a stated accuracy budget."""
