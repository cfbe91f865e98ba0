"""Contracts between exporter and runtime, lowering of the canonical graph, and the backends that run it."""
