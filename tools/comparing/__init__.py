"""The rooms of compare.py: peers, their environments, one measurement, the rounds, what is told."""
