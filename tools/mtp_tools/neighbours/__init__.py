"""Other engines on the same checkpoint, each in its own environment, measured in turns with ours."""
