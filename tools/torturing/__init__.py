"""The parts of tools/torture.py: training loops, and changes to them during a save."""
