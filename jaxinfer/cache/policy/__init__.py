"""Policies of the cache: which keys and values stay when a sequence grows, or are read."""
