"""What the integrations share. Imports no framework."""
