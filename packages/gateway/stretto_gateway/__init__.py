"""Gateway: HTTP server that records every token of the programs which use a model through it, as trajectories."""

__version__ = "0.1.0"
