"""The real trainers, with small models of random weights."""
