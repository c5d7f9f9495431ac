"""Quality, bytes and time of caches of fewer bits and of policies of the cache."""
