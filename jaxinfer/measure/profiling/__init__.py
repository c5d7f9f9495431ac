"""Profiles of a model's device time: traces of a few steps, summed up by kind of operation and part of the model."""
