"""Stands for vLLM in an environment of its own: the same module to start, the same routes, our own engine behind them."""

__version__ = "0.32.0"
