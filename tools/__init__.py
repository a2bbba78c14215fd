"""Commands beside training: python -m tools.replay, python -m tools.export, python -m tools.from_gguf."""
