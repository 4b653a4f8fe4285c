"""Trained drafts in the speculators format, loaded back and compared."""
