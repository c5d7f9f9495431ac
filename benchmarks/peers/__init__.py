"""jaxinfer next to other systems: the same weights, prompts, lengths and cores, in one run."""
