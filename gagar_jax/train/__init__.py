"""The train state and the compiled steps that change it. Rollouts, files and the run's order live elsewhere."""
