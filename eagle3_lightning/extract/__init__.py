"""The producer: the only folder, with serve/, that imports vLLM."""
