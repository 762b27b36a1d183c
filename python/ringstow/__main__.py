"""``python -m ringstow``: the ``ringstow`` program."""

from ringstow._program._cli import main

main()
