"""The plots of docs/figures.md: a module for each."""
