"""The parts of tools/sweep.py: plan and choose are pure, measure does the I/O, the rest tells."""
