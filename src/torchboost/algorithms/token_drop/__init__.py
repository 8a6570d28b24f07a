"""Token dropping."""

from torchboost.algorithms.token_drop.algorithm import TokenDrop as TokenDrop
from torchboost.algorithms.token_drop.algorithm import drop_tokens as drop_tokens
