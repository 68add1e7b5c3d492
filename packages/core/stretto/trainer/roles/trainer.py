"""Process of the trainer: ``python -m stretto.trainer.roles.trainer SPEC``. It carries out the conductor's orders one
by one.

This process is rank 0; the other ranks run `stretto_cluster.ranks.rank`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from stretto.core.canary import Canary
from stretto.core.errors import RoleFailed, StoreError, StrettoError, described
from stretto.core.events import Span
from stretto.doors.loading import from_package, look_in, of_application
from stretto.model.device import memory_named, take_share
from stretto.model.hf.folder import load_policy, save_policy, saved_dtype
from stretto.model.hf.skeleton import skeleton
from stretto.model.kernels import TRAINING, choose, unrecorded, use_onednn
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.processes.channel import ConductorGone, Failed, RoleEnd, run_role
from stretto.processes.heartbeat import begin_role
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.adapters import adapt, gather_adapters
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.messages import (
    TO_TRAINER,
    CheckpointFailed,
    CheckpointSaved,
    Copied,
    FromTrainer,
    PolicySaved,
    Publish,
    Published,
    Ready,
    SaveCheckpoint,
    SavePolicy,
    Stop,
    ToTrainer,
    Train,
    Trained,
    TrainerSpec,
)
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.outcomes import TokenWriter
from stretto.trainer.ranks import EXIT_CODE, OtherRanks, Ranks
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from stretto.weights.mailbox import Publisher
from stretto.weights.shared_memory import SharedMemoryPublisher

#: Messages that a trainer sends without an order, between its replies.
Notice = CheckpointSaved | CheckpointFailed | Published | Failed

_SMALL = 1 << 20  # bytes of a version whose writing is more work of the interpreter than of the memory


class TrainerRole:
    """Carries out orders on one rank, and returns a reply to each (`trainer.messages`)."""

    def __init__(
        self,
        spec: TrainerSpec,
        publisher: Publisher,
        ranks: Ranks,
        tell: Callable[[Notice], None],
        gpu: int = 0,
        where: str = "",
    ) -> None:
        """Load the models and the checkpoint of `spec`; raises StoreError if the checkpoint cannot be loaded, and
        OutOfMemory if the device is too small. `publisher`: where versions are published. `tell` is called in the
        writing threads with the success or failure of each checkpoint and publication. `gpu`: index of the rank's GPU
        among the visible GPUs. `where`: text that names the machine in errors, if it is not rank 0's."""
        self._gpu, self._where = gpu, where
        self._tell, self._writing, self._publishing = tell, threading.Thread(), threading.Thread()
        self._behind = False  # a version is published once the reply to its order is sent
        look_in(spec.path)
        self._config = config = TrainerConfig.model_validate_json(spec.trainer)
        self._spec, self._publisher, self._ranks = spec, publisher, ranks
        take_share(spec.share)
        with self._memory_named("while it loaded its models"):
            self._trainer = self._build(config)
            if spec.checkpoint is not None:
                self._trainer.load_checkpoint(Path(spec.checkpoint))

    def _build(self, config: TrainerConfig) -> Trainer:
        spec, ranks = self._spec, self._ranks
        model = self._trained(config)
        algorithm = AlgorithmConfig.model_validate_json(spec.algorithm)
        reference, critic = self._reference(algorithm, config), self._critic(algorithm, config)
        sink = TokenWriter(spec.tokens, ranks.rank) if spec.tokens is not None else None
        return Trainer(
            model,
            config,
            algorithm,
            spec.sampling,
            reference=reference,
            critic=critic,
            ranks=ranks,
            sink=sink,
            evidence=spec.evidence,
        )

    def _memory_named(self, doing: str) -> AbstractContextManager[None]:
        return memory_named(f"rank {self._ranks.rank}{self._where}", self._spec.gpus, self._gpu, doing)

    def _trained(self, config: TrainerConfig) -> PreTrainedModel:
        """Load the initial policy, to be trained, with adapters if the recipe has them."""
        model = self._load(Path(self._spec.model))
        if config.lora is not None:
            adapt(model, config.lora)
        return model

    def _load(self, folder: Path) -> PreTrainedModel:
        """Load a model with packed attention. With several ranks it is on the meta device until it is sharded. On a CPU
        its matmuls use oneDNN."""
        record, several = self._spec.kernels, self._ranks.count > 1
        if several:
            model = skeleton(folder, PACKED_ATTENTION)
        else:
            model = load_policy(folder, attention=PACKED_ATTENTION, dtype=torch.float32, device=self._config.device)
        if several and self._ranks.device != "cpu":
            return model
        use_onednn(model, TRAINING, unrecorded if record is None else partial(choose, record=Path(record)))
        return model

    def _reference(self, algorithm: AlgorithmConfig, config: TrainerConfig) -> ReferencePolicy | None:
        """Load the reference policy, from the folder that the recipe names, else the initial policy's; None if the
        recipe has none, or if the trained policy with adapters disabled takes its place."""
        if algorithm.reference is None or (algorithm.reference.path is None and config.lora is not None):
            return None
        folder = Path(algorithm.reference.path or self._spec.model)
        return ReferencePolicy(self._load(folder), config, self._spec.sampling, self._ranks)

    def _critic(self, algorithm: AlgorithmConfig, config: TrainerConfig) -> Critic | None:
        if algorithm.critic is None:
            return None
        return Critic(self._trained(config), config, algorithm.critic, self._ranks)

    @property
    def version(self) -> int:
        return self._trainer.version

    def carry_out(self, order: Train | Publish | SaveCheckpoint | SavePolicy) -> FromTrainer:
        """Carry out an order and return the reply: `Trained`, `Copied` or `PolicySaved`; call `replied` once it is
        sent. A version or a checkpoint is only copied by then: a thread publishes or writes it, and `tell` hears how
        that ended. All ranks must get the same orders in the same order. Raises the errors of `Trainer`, and
        OutOfMemory."""
        match order:
            case Train():
                with self._memory_named(f"in step {order.batch.step}"):
                    update = self._trainer.train(order.batch)
                spans, agreement = tuple(self._trainer.drain_spans()), self._trainer.agreement
                if order.publish and self._ranks.count > 1:
                    spans += self._publish()
                self._behind = order.publish and self._ranks.count == 1
                return Trained(update=update, spans=spans, agreement=agreement)
            case Publish():
                return Copied(span=self._publish()[-1])
            case SaveCheckpoint():
                return self._copy(order.folder)
            case SavePolicy():
                with self._memory_named("while it saved its policy"):
                    return self._save_policy(order.folder)

    def replied(self) -> None:
        """Copy the version of a step whose reply is sent, unless there are other ranks, and start to publish it: while
        the conductor prepares the next order. Raises the errors of `Trainer`, and OutOfMemory."""
        if self._behind:
            self._behind = False
            self._publish(told=True)

    def _publish(self, *, told: bool = False) -> tuple[Span, ...]:
        """Start to copy the version, and start a thread that publishes the copy. Waits for the previous publication.
        Returns the spans; `told`: the notice of the publication has them too, and a small version is published at once,
        since a thread would take turns with the next step."""
        if self._publishing.ident is not None:  # one version after the other
            self._publishing.join()
        with self._memory_named(f"while it copied version {self.version}"):
            write = self._trainer.copied(self._publisher, self._spec.canary, getattr(torch, self._spec.held))
        spans = tuple(self._trainer.drain_spans())
        publish = partial(self._write_version, write, self.version, spans if told else ())
        if told and spans[-1].bytes <= _SMALL:
            publish()
        else:
            self._publishing = threading.Thread(target=publish, name="publication")
            self._publishing.start()
        return spans

    def _write_version(
        self, write: Callable[[], tuple[Canary | None, Span]], version: int, before: tuple[Span, ...]
    ) -> None:
        """Publish a copy by `write`, and send the conductor `Published`, with the spans `before`, or `Failed` with the
        error, whatever it is."""
        try:
            canary, span = write()
            told: Published | Failed = Published(version=version, canary=canary, span=span, before=before)
        except Exception as error:  # errors of a thread would be lost, and torch raises many kinds
            traceback.print_exc()
            problem = described(error) if isinstance(error, OSError) else str(error)
            code = error.exit_code if isinstance(error, StrettoError) else RoleFailed.exit_code
            told = Failed(problem=f"version {version} cannot be published: {problem}", exit_code=code)
        with contextlib.suppress(ConductorGone):
            self._tell(told)

    def _copy(self, folder: str) -> Copied:
        """Copy the training state, and start a thread that writes the copy to `folder`. Waits for the previous
        checkpoint."""
        if self._writing.ident is not None:  # ranks write together, one checkpoint after the other
            self._writing.join()
        with self._memory_named("while it copied its state"):
            write = self._trainer.snapshot()
        (span,) = self._trainer.drain_spans()
        self._writing = threading.Thread(target=self._write, args=(write, folder), name="checkpoint")
        self._writing.start()
        return Copied(span=span)

    def _write(self, write: Callable[[Path], None], folder: str) -> None:
        """Write a checkpoint by `write`, and send the conductor `CheckpointSaved`, or `CheckpointFailed` with the
        error."""
        told: CheckpointSaved | CheckpointFailed = CheckpointSaved(folder=folder)
        try:
            write(Path(folder))
        except StrettoError as error:
            traceback.print_exc()
            told = CheckpointFailed(folder=folder, problem=str(error), exit_code=error.exit_code)
        except Exception as error:  # errors of a thread would be lost, and torch raises many kinds
            traceback.print_exc()
            told = CheckpointFailed(folder=folder, problem=f"{folder}: {error!r}", exit_code=RoleFailed.exit_code)
        with contextlib.suppress(ConductorGone):
            self._tell(told)

    def _save_policy(self, folder: str) -> PolicySaved:
        began = time.monotonic()
        parameters, ours = self._trainer.full_parameters(), self._ranks.rank == 0
        model, lora = self._trainer.learner.model, self._config.lora
        write_adapters = gather_adapters(model, lora, self._ranks) if lora is not None else None
        if ours:
            start = Path(self._spec.model)
            dtype = saved_dtype(self._config.save_dtype, start)
            save_policy(model, start, Path(folder), parameters, write_adapters, dtype)
        for _ in parameters:  # other ranks take part in the gathers
            pass
        span = Span(role="trainer", name="checkpoint", start=began, end=time.monotonic(), version=self._trainer.version)
        return PolicySaved(folder=folder, span=span)


def published_dtype(spec: TrainerSpec) -> torch.dtype | None:
    """The dtype in which all ranks gather published parameters; None: the parameters' own dtype."""
    return None if spec.published is None else getattr(torch, spec.published)


def lead(spec: TrainerSpec, channel: RoleEnd[ToTrainer], spawner: Spawner) -> None:
    """Carry out the conductor's orders, which come over `channel`, together with the other ranks, until `Stop` or until
    the conductor is gone. `spawner` starts the other ranks of this machine. If another rank is lost, the loss is sent
    and the process exits. A failed publication is sent too, and ends the process at once."""
    group = _other_ranks(spec, spawner)

    def tell(message: Notice) -> None:
        if isinstance(message, CheckpointFailed) and group.explain(StoreError(message.problem)) is not None:
            return  # a dead rank makes the write fail too; the group reports the loss and ends the trainer
        channel.send(message)
        if isinstance(message, Failed):
            os._exit(message.exit_code)  # the main thread may be in a step

    try:
        ranks = group.start(channel.send)
        publisher = SharedMemoryPublisher(spec.mailbox, Path(spec.mailbox_folder), published_dtype(spec))
        role = TrainerRole(spec, publisher, ranks, tell)
        channel.send(Ready(version=role.version))
        while (order := channel.receive()) is not None:
            group.forward(order)
            if isinstance(order, Stop):
                return
            channel.send(role.carry_out(order))
            role.replied()
    except Exception as error:  # a dead rank makes collectives fail, with errors of many kinds
        if (loss := group.explain(error)) is None:
            raise
        channel.send(loss)
        sys.exit(EXIT_CODE)


def _other_ranks(spec: TrainerSpec, spawner: Spawner) -> OtherRanks:
    """The other ranks, not started. Raises RecipeError if the recipe has several and `stretto-cluster` is missing."""
    if TrainerConfig.model_validate_json(spec.trainer).ranks == 1:
        return OtherRanks()
    group: OtherRanks = from_package("stretto_cluster.ranks.rank_group:RankGroup", "trainer.ranks")(spec, spawner)
    return group


def main(arguments: list[str]) -> int:
    """Run the process; returns its exit code (`channel.run_role`). `arguments`: a `TrainerSpec` as JSON."""
    spec = msgspec.json.decode(arguments[0], type=TrainerSpec)
    several = TrainerConfig.model_validate_json(spec.trainer).local_ranks > 1
    spawner: Spawner = FRESH
    if several:  # forks need not import torch again
        spawner = of_application("forking.role:fork_here", lambda: FRESH)()
    begin_role()
    torch.set_num_threads(spec.threads)
    channel: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    return run_role(lambda: lead(spec, channel, spawner), channel.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
