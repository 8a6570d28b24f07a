"""Benchmarks of whole training runs, and their reports."""
