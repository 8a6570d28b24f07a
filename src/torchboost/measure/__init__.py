"""Paired timing, intervals, and the records of results."""
