"""The specs of the processes that train; light, so that the loop can name them without torch."""

from __future__ import annotations

from stretto.core.records import Record, Sampling


class TokensSpec(Record, frozen=True):
    """Where what became of each token is kept; `config` is the JSON text of its `TokensConfig`."""

    folder: str
    config: str


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
    held: str = "float32"  # the dtype in which engines hold weights, whatever is published
    hung: float = 10.0  # seconds without a heartbeat after which another rank is given up
    rank_host: str = ""  # the address of this machine at which other ranks join; "": the loopback's
    collective: float = 1800.0  # seconds that ranks wait for each other at most
    assembly: float = 90.0  # seconds in which ranks on other machines have to join
    tls: str = ""  # folder of certificates (`processes.tls`) for the orders of ranks; "": no TLS
    tokens: TokensSpec | None = None  # None: nothing is kept of single tokens
    path: str = ""  # folder in which modules of the user's own parts are looked for first
    canary: tuple[int, ...] = ()  # the text by which engines prove each version (`core.canary`)


class RankSpec(Record, frozen=True):
    """The spec of ranks 1, 2, ...: where rank 0 is, and what differs between machines. All else they get from rank 0.

    The key stands in the environment variable `RANK_KEY`: other users of a machine can read its command lines.
    """

    rank: int
    host: str
    port: int
    threads: int
    hung: float = 10.0  # seconds without a heartbeat of rank 0 after which the rank ends
    gpu: int = 0  # its own, of those that it sees
    model: str | None = None  # the model folder on this machine; None: the same path as rank 0's
    reference: str | None = None  # the folder of `algorithm.reference.path`, likewise
    tls: str = ""  # the folder of certificates on this machine; "": no TLS


RANK_ROLE = "stretto.trainer.roles.rank"
RANK_KEY = "STRETTO_RANK_KEY"


class SupervisedSpec(Record, frozen=True):
    """The spec of supervised learning: `examples` is a file of `Examples`, `config` the JSON text of their config."""

    model: str
    examples: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int = -1
