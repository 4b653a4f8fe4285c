"""The buffered queue between vLLM and the trainer: shared memory, messages, order, packing."""
