"""Measures runs and writes reports of them."""
