"""Parts of a run as classes for training loops of one's own: `stretto.Trainer`, `Engine`, `Scheduler`, `Ledger`."""

__version__ = "0.1.0"
