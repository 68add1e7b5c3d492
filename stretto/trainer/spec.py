"""What the processes that train are started with; light, so that the loop can name them without torch."""

from __future__ import annotations

from stretto.core.records import Record, Sampling


class TrainerSpec(Record, frozen=True):
    """What the trainer is started with; the two configurations are JSON texts of their pydantic models.

    `sampling` is the record that the engines' requests carry: both sides speak of one distribution. `kernels` is the
    file that says which kernels the run uses; None: a run that has no such file.
    """

    model: str
    mailbox: str
    mailbox_folder: str
    trainer: str
    algorithm: str
    sampling: Sampling
    threads: int
    checkpoint: str | None = None
    descriptor: int = -1
    log: str = "trainer.txt"  # the file that this process writes; other ranks write beside it
    kernels: str | None = None
    hung: float = 10.0  # seconds without a heartbeat after which another rank is killed


class SupervisedSpec(Record, frozen=True):
    """What the process is started with; `examples` is a file of `Examples`, `config` is of their kind, as JSON."""

    model: str
    examples: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int = -1
