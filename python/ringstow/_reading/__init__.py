"""Loads into an existing state dict: names, comparison, reads, changes, in this order."""
