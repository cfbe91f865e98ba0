"""Structured output: what an answer must look like, as masks of the next token."""
