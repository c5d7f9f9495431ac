"""Makes the embedded models again."""
