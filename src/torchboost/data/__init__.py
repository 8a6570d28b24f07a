"""Waiting for data: a loader that measures itself, and loads the same batches ahead in workers if that pays."""
