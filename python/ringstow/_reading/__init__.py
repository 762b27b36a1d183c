"""Loads into an existing state dict: select names, compare, read, then change, in this order."""
