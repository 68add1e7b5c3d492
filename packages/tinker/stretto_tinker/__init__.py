"""The interface of the Tinker SDK over stretto: `stretto tinker`."""
