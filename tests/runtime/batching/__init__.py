"""Tests of several answers at once."""
