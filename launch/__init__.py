"""Starting one run on several hosts. Imports gagar_jax; nothing in gagar_jax imports it."""
