"""Commands beside training: python -m tools.export, python -m tools.from_gguf."""
