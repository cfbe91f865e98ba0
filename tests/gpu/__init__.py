"""Tests of the PyTorch interpreter and of the runner that GPU backends share, on a CPU."""
