"""Workflows of many turns between a prompt and its verdict: the users' own, and those that are built in."""
