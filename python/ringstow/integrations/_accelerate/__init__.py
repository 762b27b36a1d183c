"""What `ringstow.integrations.accelerate` is made of."""
