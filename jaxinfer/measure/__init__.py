"""Measurements: benchmarks, profiles, and which options pay off."""
