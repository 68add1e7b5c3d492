"""Conversations as tokens: the forest of a trajectory, recorded turns and calls."""
