"""Gateway: any program that uses a model over HTTP makes a trajectory, whose tokens are recorded on our side."""

__version__ = "0.1.0"
