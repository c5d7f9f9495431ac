"""An OpenAI-compatible server: HTTP routes over the public API, and a chat page."""
