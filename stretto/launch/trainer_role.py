"""The trainer's process: ``python -m stretto.launch.trainer_role SPEC``. Takes orders, one after the other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from stretto.core.events import Span
from stretto.core.lifeline import die_with_parent, keep_beating
from stretto.core.records import Record, Sampling
from stretto.launch.channel import RoleEnd
from stretto.launch.messages import (
    TO_TRAINER,
    Publish,
    Published,
    Ready,
    SaveCheckpoint,
    Saved,
    SavePolicy,
    Stop,
    ToTrainer,
    Train,
    Trained,
)
from stretto.launch.playing import play
from stretto.model.folder import load_policy, save_policy
from stretto.model.packed import PACKED_ATTENTION
from stretto.trainer.algorithm import AlgorithmConfig
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.update import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher


class TrainerSpec(Record, frozen=True):
    """What the trainer is started with; the two configurations are JSON texts of their pydantic models.

    `sampling` is the record that the engines' requests carry: both sides speak of one distribution.
    """

    parent: int
    model: str
    mailbox: str
    mailbox_folder: str
    trainer: str
    algorithm: str
    sampling: Sampling
    threads: int
    checkpoint: str | None = None
    descriptor: int = -1


class TrainerRole:
    """Order in, answer out; see `launch.messages`."""

    def __init__(self, spec: TrainerSpec, channel: RoleEnd[ToTrainer]) -> None:
        config = TrainerConfig.model_validate_json(spec.trainer)
        self._spec = spec
        self._channel = channel
        model = _load(Path(spec.model), config)
        algorithm = AlgorithmConfig.model_validate_json(spec.algorithm)
        reference, critic = self._reference(algorithm, config), self._critic(algorithm, config)
        self._trainer = Trainer(model, config, algorithm, spec.sampling, reference=reference, critic=critic)
        if spec.checkpoint is not None:
            self._trainer.load_checkpoint(Path(spec.checkpoint))
        self._publisher = SharedMemoryPublisher(spec.mailbox, Path(spec.mailbox_folder))

    def _reference(self, algorithm: AlgorithmConfig, config: TrainerConfig) -> ReferencePolicy | None:
        """The policy to stay close to: that of its own folder, or the one that the run starts from."""
        if algorithm.reference is None:
            return None
        folder = Path(algorithm.reference.path or self._spec.model)
        return ReferencePolicy(_load(folder, config), config, self._spec.sampling)

    def _critic(self, algorithm: AlgorithmConfig, config: TrainerConfig) -> Critic | None:
        """A critic that begins as the policy at the start."""
        if algorithm.critic is None:
            return None
        return Critic(_load(Path(self._spec.model), config), config, algorithm.critic)

    def run(self) -> None:
        """Carry out orders until `Stop` or until the conductor is gone."""
        self._channel.send(Ready(version=self._trainer.version))
        while (order := self._channel.receive()) is not None:
            match order:
                case Train():
                    update = self._trainer.train(order.batch)
                    if order.publish:
                        self._trainer.publish(self._publisher)
                    self._channel.send(Trained(update=update, spans=tuple(self._trainer.drain_spans())))
                case Publish():
                    self._trainer.publish(self._publisher)
                    self._trainer.drain_spans()
                    self._channel.send(Published(version=self._trainer.version))
                case SaveCheckpoint():
                    self._trainer.save_checkpoint(Path(order.folder))
                    (span,) = self._trainer.drain_spans()
                    self._channel.send(Saved(folder=order.folder, span=span))
                case SavePolicy():
                    self._save_policy(order.folder)
                case Stop():
                    return

    def _save_policy(self, folder: str) -> None:
        start = time.monotonic()
        save_policy(self._trainer.learner.model, Path(self._spec.model), Path(folder))
        span = Span(role="trainer", name="checkpoint", start=start, end=time.monotonic(), version=self._trainer.version)
        self._channel.send(Saved(folder=folder, span=span))


def _load(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    return load_policy(folder, attention=PACKED_ATTENTION, dtype=torch.float32, device=config.device)


def main(arguments: list[str]) -> int:
    """Play the role; see `launch.playing`."""
    spec = msgspec.json.decode(arguments[0], type=TrainerSpec)
    die_with_parent(spec.parent)
    keep_beating()
    torch.set_num_threads(spec.threads)
    channel: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    return play(lambda: TrainerRole(spec, channel).run(), channel.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
