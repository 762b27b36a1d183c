"""Information for callers: reports, callbacks, progress bars, the history of a run."""
