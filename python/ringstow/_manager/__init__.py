"""`CheckpointManager`, and what it works with on one process, several ranks or several nodes."""
