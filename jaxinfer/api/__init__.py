"""Public API; `jaxinfer` has its names."""
