"""Sampling: its law under speculation, by counts, and every part of it alone."""
