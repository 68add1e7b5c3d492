"""Server for clients of the Tinker SDK, computed by stretto: `stretto tinker`."""

__version__ = "0.1.0"
