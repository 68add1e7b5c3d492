"""The interface of the Tinker SDK over stretto: `stretto tinker`."""

__version__ = "0.1.0"
