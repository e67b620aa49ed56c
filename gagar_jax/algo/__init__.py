"""The arithmetic of GAGAR: pure functions of arrays, no configuration, no I/O.

Start with `advantage.py`, the paper's lines in the paper's order.
"""
