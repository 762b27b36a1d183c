"""Parts of `ringstow.integrations.megatron`."""
