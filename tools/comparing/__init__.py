"""The parts of compare.py: peers, their environments, one measurement, the rounds, the table."""
