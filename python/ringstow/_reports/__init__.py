"""What a caller is told: reports, callbacks, progress bars, the history of a run."""
