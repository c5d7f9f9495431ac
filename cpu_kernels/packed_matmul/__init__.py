"""Products with weights that are packed for CPUs."""
