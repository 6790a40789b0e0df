"""A server that the user has started, vLLM or SGLang: an adapter travels, and what it says is compared."""
