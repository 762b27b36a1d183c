"""How the ranks of a save or load meet: one coordinator, for one process and for a group."""
