"""Targets that are renamed once they are complete, for kinds without a commit of their own."""
