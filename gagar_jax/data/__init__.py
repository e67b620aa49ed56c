"""From texts and trajectories to arrays: tokenizer, task order, packed batches. NumPy only, no jax."""
