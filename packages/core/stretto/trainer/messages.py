"""Arguments of training processes, and messages between the conductor and them. The loop imports this module without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from stretto.core.canary import Agreement, Canary
from stretto.core.events import Span, SupervisedProgress
from stretto.core.records import Batch, Record, Sampling, Update
from stretto.processes.channel import Failed

#: The sampled tokens that show which weights an engine has, since their version alone has computed their context: every
#: token; those of completions that no update has interrupted (the native engine with ``engine.on_update = "keep"``); or
#: none (other servers with "keep", which also keep the KV entries of earlier prompts).
Evidence = Literal["all", "uninterrupted", "none"]


class TokensSpec(Record, frozen=True):
    """Argument of trainers that store per-token results: the `folder` for them, and `config`, the JSON text of a
    `TokensConfig`."""

    folder: str
    config: str


class TrainerSpec(Record, frozen=True):
    """Arguments of the trainer's process; `trainer` and `algorithm` are JSON texts of their pydantic models.

    `model`: folder of version 0. `mailbox`, `mailbox_folder`: name of the run and folder of its published versions
    (`weights.shared_memory`). `sampling`: the engines' settings, so that engines and trainer evaluate the same
    distribution. `threads`: of torch. `checkpoint`: folder to begin with; None: version 0. `descriptor`: file
    descriptor of this process's end of the channel to the conductor; set at the start. `kernels`: file that keeps the
    run's choice of kernels; None: no file. `published`: dtype of published floating-point numbers; None: the trainer's
    dtype. `held`: dtype in which engines hold weights. `hung`, `collective`, `assembly`: deadlines in seconds of a
    rank's heartbeat, of a collective, and of remote ranks to join. `canary`: its text, as token ids. `rank_host`:
    address at which other ranks join ("": loopback); `tls`: folder of certificates between ranks ("": no TLS).
    `tokens`: None: no per-token results. `path`: folder searched first for the user's modules. `gpus`: ids that the
    ranks of a machine see (empty: all); `share`: part of a GPU's memory that a rank may take. `evidence`: tokens by
    which engines are judged.
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
    tls: str = ""  # folder of certificates (`http.tls`) for connections between ranks; "": no TLS
    tokens: TokensSpec | None = None  # None: no per-token results
    path: str = ""  # folder searched first for the user's modules
    canary: tuple[int, ...] = ()  # the text by which engines prove each version (`core.canary`)
    gpus: tuple[str, ...] = ()  # ids of the GPUs that the ranks of a machine see; empty: all
    share: float = 1.0  # part of its GPU's memory that a rank's tensors may take
    evidence: Evidence = "all"  # tokens by which engines are judged


class SupervisedSpec(Record, frozen=True):
    """Arguments of the process of supervised learning. `model`: folder of the policy to train; `out`: folder for the
    trained one. `examples`: file with `Examples` in MessagePack. `config`: JSON text of a `SupervisedConfig` or
    `PreferenceConfig`. `seed`: decides the order of the examples. `descriptor`: file descriptor of this process's end
    of the channel to its parent. `role`: its name in messages. `gpus`: ids of the GPUs that it sees; empty: all."""

    model: str
    examples: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int = -1
    role: str = "warm start"
    gpus: tuple[str, ...] = ()


class Train(Record, frozen=True, tag=True):
    """Order: train on this batch and publish the next version; reply `Trained`, then the notice `Published`. `publish`:
    False for steps that are repeated to restore a trainer."""

    batch: Batch
    publish: bool = True


class Publish(Record, frozen=True, tag=True):
    """Order: publish the trainer's current version; reply `Copied`, then the notice `Published`."""


class SaveCheckpoint(Record, frozen=True, tag=True):
    """Order: copy the trainer's state in memory; reply `Copied`. The copy is written to this folder while other orders
    run; then the notice `CheckpointSaved` or `CheckpointFailed` follows."""

    folder: str


class SavePolicy(Record, frozen=True, tag=True):
    """Order: write the policy as a Hugging Face folder; reply `PolicySaved`."""

    folder: str


class Stop(Record, frozen=True, tag=True):
    """Order: end the process."""


class RanksAwaited(Record, frozen=True, tag=True):
    """Request to the conductor: start these ranks on other machines. They join rank 0 at this address with this key
    (`stretto_cluster.ranks.rank`). Valid for one trainer process; a replacement sends a new request."""

    host: str
    port: int
    key: str
    ranks: tuple[int, ...]


class Ready(Record, frozen=True, tag=True):
    """Message: the trainer is ready for orders and holds this version."""

    version: int


class Published(Record, frozen=True, tag=True):
    """Notice: engines can load the version. `canary`: expected scores by which they prove it, if the run has a canary.
    `span`: time and bytes of the writing, which ran beside other work; None: not measured. `before`: spans of proving
    and copying the version, which began once the reply to its order was sent."""

    version: int
    canary: Canary | None = None
    span: Span | None = None
    before: tuple[Span, ...] = ()


class Trained(Record, frozen=True, tag=True):
    """Reply: the step is done. If ordered, the next version is copied before the next order is read. `agreement`: by
    engine, how far its log-probabilities of tokens by the version before the step are from the trainer's."""

    update: Update
    spans: tuple[Span, ...]
    agreement: tuple[Agreement, ...] = ()  # one per engine with tokens sampled by the version before the step


class Copied(Record, frozen=True, tag=True):
    """Reply to `SaveCheckpoint` and `Publish`: the state is copied in memory, so training may continue."""

    span: Span


class CheckpointSaved(Record, frozen=True, tag=True):
    """Notice: the checkpoint is written to its folder."""

    folder: str


class CheckpointFailed(Record, frozen=True, tag=True):
    """Notice: the checkpoint could not be written. `problem` is for the user, and `exit_code` for a command that ends
    with it; the traceback is in the process's log."""

    folder: str
    problem: str
    exit_code: int


class PolicySaved(Record, frozen=True, tag=True):
    """Reply to `SavePolicy`: the policy is written to its folder."""

    folder: str
    span: Span


class RankLost(Record, frozen=True, tag=True):
    """Notice: a rank died or hangs, so the trainer ends; `how` names the rank and the cause."""

    how: str


ToTrainer = Train | Publish | SaveCheckpoint | SavePolicy | Stop
FromTrainer = (
    RanksAwaited
    | Ready
    | Published
    | Trained
    | Copied
    | CheckpointSaved
    | CheckpointFailed
    | PolicySaved
    | Failed
    | RankLost
)

TO_TRAINER: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the completion to learn, both as token ids; the completion includes its end-of-sequence token.

    Example: ``Demonstration(prompt_ids=(5, 12, 8), completion_ids=(4, 4, 1))``
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class Preference:
    """Two completions of one prompt, each with its end-of-sequence token.

    Example: ``Preference(prompt_ids=(5, 12, 8), chosen_ids=(4, 4, 1), rejected_ids=(7, 1))``
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of both sequences, each with the prompt."""
        return 2 * len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


class Demonstrations(Record, frozen=True, tag=True):
    """Demonstrations for supervised fine-tuning."""

    examples: tuple[Demonstration, ...]


class Preferences(Record, frozen=True, tag=True):
    """Preference pairs, and the folder of the reference policy."""

    pairs: tuple[Preference, ...]
    reference: str


Examples = Demonstrations | Preferences


class SupervisedDone(Record, frozen=True, tag=True):
    """Message: training has ended, and the trained policy is saved in its folder."""


FromSupervised = SupervisedProgress | SupervisedDone | Failed
FROM_SUPERVISED: msgspec.msgpack.Decoder[FromSupervised] = msgspec.msgpack.Decoder(FromSupervised)
