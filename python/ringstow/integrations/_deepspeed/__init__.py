"""What `ringstow.integrations.deepspeed` is made of."""
