"""Rollouts: a compiled loop on the device (`sampler`), the host behind its callback (`exchange`, `episode`)."""
