"""Attention over keys and values in pages."""
