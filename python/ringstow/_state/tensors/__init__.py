"""Internal: where the elements of torch's tensors, numpy's arrays and arrays on GPUs lie.

torch and numpy are looked up when they are needed, and never imported by ``import ringstow``.
"""
