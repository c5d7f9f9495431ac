"""OpenAI's API: one reader from bodies to requests, one writer from outputs to answers, for server, batch and `LLM`."""
