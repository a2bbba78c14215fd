"""A run's folder: its log, its checkpoints, when they are written, and what is refused before torch is imported."""
