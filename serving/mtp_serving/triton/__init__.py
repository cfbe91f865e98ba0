"""A bundle as a model of Triton Inference Server: what writes its repository, and what runs in its Python backend."""
