"""Tests of the engine builders."""
