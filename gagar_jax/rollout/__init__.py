"""Rollouts: a compiled loop on the device (`sampler`) and the host behind its callback (`exchange`)."""
