"""What tools/torture.py does to a training loop while it is being saved."""
