"""EAGLE-3 draft training for vLLM: hidden states made online, streamed, trained on, exported and served."""

__version__ = "0.1.0"
