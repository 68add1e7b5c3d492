"""Agents of a run: programs that are started once for each trajectory, and services that come for one."""
