"""Workflows of many turns between a prompt and its verdict: built-in ones and users' own."""
