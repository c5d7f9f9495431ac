"""Attention to keys in pages."""
