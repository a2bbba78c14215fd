"""What several test files need, by topic."""

from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
TOPICS = [f"helpers.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")]
pytest.register_assert_rewrite(*TOPICS)  # a failed assertion tells there, too, what it compared
