"""Targets that get their name once they are complete, for kinds without a commit of their own."""
