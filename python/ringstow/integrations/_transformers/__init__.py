"""Parts of `ringstow.integrations.transformers`. Imports no framework."""
