"""A draft measured in vLLM."""
