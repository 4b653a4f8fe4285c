"""The draft and its loss: pure torch, no Lightning, no vLLM."""
