"""The specs of the processes that train; light, so that the loop can name them without torch."""

from __future__ import annotations

from stretto.core.records import Record, Sampling


class TrainerSpec(Record, frozen=True):
    """The trainer's spec; `trainer` and `algorithm` are JSON texts of their pydantic models.

    `sampling` is the record of the engines' requests, so that both sides have one distribution. `kernels` is the file
    with the run's choice of kernels, if it has one. `published` is the dtype of published numbers, None: the trainer's.
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
    published: str | None = None
    hung: float = 10.0  # seconds without a heartbeat after which another rank is killed


class SupervisedSpec(Record, frozen=True):
    """The spec of supervised learning: `examples` is a file of `Examples`, `config` the JSON text of their config."""

    model: str
    examples: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int = -1
