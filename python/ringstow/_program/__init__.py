"""The Python part of the ``ringstow`` program."""
