"""The HTTP server: the OpenAI API in front of an `AsyncEngine`."""
