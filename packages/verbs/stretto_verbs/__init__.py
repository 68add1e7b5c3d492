"""Faces of the parts of a run, for training loops of one's own: `stretto.Trainer`, `Engine`, `Scheduler`, `Ledger`."""

__version__ = "0.1.0"
