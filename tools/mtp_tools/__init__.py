"""Tools around a bundle: verification, acceptance, the demo, and makers of checkpoints."""
