"""Structured output: which tokens may follow, so that an answer matches a JSON schema, a regular expression, a list of
choices or a grammar."""
