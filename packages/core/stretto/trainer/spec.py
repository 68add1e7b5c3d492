"""Arguments of training processes. The loop imports this module without torch."""

from __future__ import annotations

from stretto.core.records import Record, Sampling


class TokensSpec(Record, frozen=True):
    """Folder in which per-token results are stored; `config` is the JSON text of a `TokensConfig`."""

    folder: str
    config: str


class TrainerSpec(Record, frozen=True):
    """Arguments of the trainer's process; `trainer` and `algorithm` are JSON texts of their pydantic models.

    `sampling`: the engines' settings, so that engines and trainer evaluate the same distribution. `kernels`: file with
    the run's choice of kernels, if any. `published`: dtype of published floating-point numbers; None: the trainer's
    dtype.
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
    log: str = "trainer.txt"  # log file of this process; other ranks have log files in the same folder
    kernels: str | None = None
    published: str | None = None
    held: str = "float32"  # dtype in which engines hold weights
    hung: float = 10.0  # seconds without a heartbeat after which another rank counts as hung
    rank_host: str = ""  # address of this machine at which other ranks join; "": loopback
    collective: float = 1800.0  # most seconds that ranks wait for each other
    assembly: float = 90.0  # seconds for ranks on other machines to join
    tls: str = ""  # folder of certificates (`processes.tls`) for connections between ranks; "": no TLS
    tokens: TokensSpec | None = None  # None: no per-token results
    path: str = ""  # folder searched first for the user's modules
    canary: tuple[int, ...] = ()  # the text by which engines prove each version (`core.canary`)
    gpus: tuple[str, ...] = ()  # ids of the GPUs that the ranks of a machine see; empty: all
    share: float = 1.0  # part of its GPU's memory that a rank's tensors may take


class RankSpec(Record, frozen=True):
    """Arguments of the process of rank 1, 2, ...: the address of rank 0, and settings that differ between machines.
    Rank 0 sends the other settings after the rank has joined.

    The key is in the environment variable `RANK_KEY`, because other users of a machine can read command lines.
    """

    rank: int
    host: str
    port: int
    threads: int
    hung: float = 10.0  # seconds without a heartbeat of rank 0 after which the rank ends
    gpu: int = 0  # index of its GPU among the visible GPUs
    model: str | None = None  # the model folder on this machine; None: the same path as rank 0's
    reference: str | None = None  # `algorithm.reference.path` on this machine; None: the same path as rank 0's
    tls: str = ""  # the folder of certificates on this machine; "": no TLS


RANK_ROLE = "stretto.trainer.roles.rank"
RANK_KEY = "STRETTO_RANK_KEY"


class SupervisedSpec(Record, frozen=True):
    """Arguments of the process of supervised learning. `examples`: file with `Examples` in MessagePack. `config`: JSON
    text of a `SupervisedConfig` or `PreferenceConfig`. `gpus`: ids of the GPUs that it sees; empty: all."""

    model: str
    examples: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int = -1
    role: str = "warm start"
    gpus: tuple[str, ...] = ()
