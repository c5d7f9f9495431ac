"""Where a model's device time goes: traces of a few steps, summed up by kind of operation and part of the model."""
