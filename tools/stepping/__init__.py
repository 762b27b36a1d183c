"""The parts of step_time.py: contenders, training loops, the GIL, small tensors, report."""
