"""vLLM as engine: a process of its own, in a Python environment of its own, that is never taken at its word."""
