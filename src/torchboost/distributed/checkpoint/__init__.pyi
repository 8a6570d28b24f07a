from .checkpoint import Part as Part
from .checkpoint import latest as latest
from .checkpoint import load as load
from .checkpoint import save as save
