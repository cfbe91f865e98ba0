"""Tests of structured output."""
