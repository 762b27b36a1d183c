"""The ``ringstow`` program, as far as it is written in Python."""
