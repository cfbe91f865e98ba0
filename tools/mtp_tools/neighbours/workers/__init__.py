"""One file for each engine, run by `host.py` in the engine's own environment, where this project is not installed."""
