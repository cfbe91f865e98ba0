"""Serving a bundle: an OpenAI-compatible server, Triton Inference Server, and files of prompts."""
