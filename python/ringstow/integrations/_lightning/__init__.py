"""Code that `ringstow.integrations.lightning` and ``pytorch_lightning`` share. Imports neither."""
