"""The train state and the compiled steps that change it. No rollouts, no files."""
