"""reasoning_gym's tasks. Its scorers may execute what they score, so they run in a confined child process."""
