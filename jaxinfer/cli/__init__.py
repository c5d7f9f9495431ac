"""The command line. One file per command; importing any of them loads neither JAX nor another slow package."""
