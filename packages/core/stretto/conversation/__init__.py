"""Conversations as tokens: the forest of a trajectory, chat messages, recorded turns and calls."""
