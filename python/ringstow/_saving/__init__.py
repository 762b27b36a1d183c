"""Saves by one process: in the foreground and the background, and the copies that follow."""
