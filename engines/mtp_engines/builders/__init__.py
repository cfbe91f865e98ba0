"""Builders: each turns the canonical graphs of a bundle into engine files for a device."""
