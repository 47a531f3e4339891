"""A browser demo and an OpenAI-compatible server for the tri-mode model; both belong to a later version."""
