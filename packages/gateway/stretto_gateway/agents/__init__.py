"""Agents of a run: programs started once per trajectory, and external services that request sessions."""
