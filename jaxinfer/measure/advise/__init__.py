"""Which options pay for a model: each tried alone against the model as it is, and those that help together."""
