"""Internal: the memory of torch tensors, numpy arrays and arrays on GPUs.

torch and numpy are imported on demand, never by ``import ringstow``.
"""
