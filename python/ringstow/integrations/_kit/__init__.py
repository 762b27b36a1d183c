"""Code that the integrations share. Imports no framework."""
