"""Tests of checkpoint loading and of the exported graphs."""
