"""Stopwatch, statistics and evidence."""
