"""Training: the embedded pair, and drafts distilled from a target."""
