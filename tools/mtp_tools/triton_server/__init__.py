"""A Triton Inference Server without a container or a GPU, from a wheel that carries one, for tests and trials."""
