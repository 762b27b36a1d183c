"""Communication of the ranks of a save or load, for one process and for a group."""
