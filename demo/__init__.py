"""A browser demo and an OpenAI-compatible server for the tri-mode model."""
