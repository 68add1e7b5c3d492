"""Workflows: trajectories of many turns, made by Python classes in processes of their own."""

__version__ = "0.1.0"
