"""Transformers as the oracle of the conversion and of the bundle; this folder alone imports it and torch."""
