"""What caches of fewer bits and policies of the cache cost a model, in quality, bytes and time."""
