"""Pages of the cache beyond the device: in the host's memory, and in files."""
