"""Parts of `ringstow.integrations.deepspeed`."""
