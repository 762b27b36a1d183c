"""Parts of `ringstow.integrations.torchtitan`."""
