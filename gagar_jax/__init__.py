"""Reinforcement learning of code agents with GAGAR (arXiv 2609.32577), compiled end to end in JAX.

Start reading at `loop.py` (a whole run, in order of execution) and `algo/advantage.py` (the paper's page).
Nothing is imported here: importing the package costs nothing and starts no device.
"""

__version__ = "0.1.0"
