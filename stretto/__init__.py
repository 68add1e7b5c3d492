"""stretto: language models learn to reason by reinforcement learning that never waits."""

__version__ = "0.1.0"
