"""Checkpoints of published shapes with made-up weights, for measuring sizes and times."""
