"""The recipes: YAML files that ship with the package. Not imported by gagar_jax; read by path."""
