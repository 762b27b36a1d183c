"""``python -m ringstow``: the ``ringstow`` program."""

from ringstow._cli import main

main()
