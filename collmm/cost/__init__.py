"""What compute and communication cost on the chips we know, in seconds. Never imports jax."""
