"""Whether what was written says what the checkpoint says: against NumPy, stage by stage, over a text."""
