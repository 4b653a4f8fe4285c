"""Prompts: files, chat templates, what is supervised."""
