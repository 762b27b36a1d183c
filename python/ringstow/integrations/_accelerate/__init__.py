"""Parts of `ringstow.integrations.accelerate`."""
