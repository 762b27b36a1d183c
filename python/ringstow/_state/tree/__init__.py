"""Internal: state dicts to a manifest's JSON tree and back.

`_encode` describes the tree and writes it, `_skeleton` reads it and walks what was read, `_build`
makes the values. `_select` cuts out what a load asked for, `_rename` maps names, `_mismatch` says
why a checkpoint does not fit.
"""
