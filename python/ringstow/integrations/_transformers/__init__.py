"""What `ringstow.integrations.transformers` is made of. Imports no framework."""
