"""Tests of the runtime: one request decoded greedily, and batches on the level of the engine."""
