"""Internal: converts state dicts to a manifest's JSON tree and back.

`_encode` describes and writes the tree, `_skeleton` reads it, `_build` makes the values. `_select`
selects the requested part, `_rename` maps names, `_mismatch` explains why a checkpoint does not
fit.
"""
