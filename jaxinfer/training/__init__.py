"""Training: the embedded pair, and later drafts distilled from a target."""
