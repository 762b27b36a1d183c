"""`CheckpointManager`, and its parts for one process, several ranks and several nodes."""
