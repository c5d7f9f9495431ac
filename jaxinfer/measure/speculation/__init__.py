"""Drafts compared on real text: tokens a round by kind of text, and speed by draft length and concurrency."""
