"""An agent's door: any program that speaks to a model over HTTP makes a session, with the tokens kept on this side."""

__version__ = "0.1.0"
