"""Runs inside the workers of a server, in its environment; nothing of stretto is imported there."""
