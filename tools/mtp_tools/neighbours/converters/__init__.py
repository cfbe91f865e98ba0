"""Scripts that make an engine's model from the checkpoint, run in the engine's own environment."""
