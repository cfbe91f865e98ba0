"""Weights on their way into the one weight file of a bundle, in the format that was asked for."""
