"""Commands beside training: python -m tools.replay, python -m tools.export."""
