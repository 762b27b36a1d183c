"""What `ringstow.integrations.megatron` is made of."""
