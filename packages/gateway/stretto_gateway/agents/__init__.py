"""Agents of a run: programs that are started once per trajectory, and external services that request sessions."""
