"""The parts of tools/sweep.py: plan and choose are pure, measure does I/O, the rest reports."""
