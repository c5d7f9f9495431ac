"""Hugging Face repositories: their configuration, tensor names and files."""
