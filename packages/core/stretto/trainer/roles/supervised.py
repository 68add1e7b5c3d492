"""Process of supervised learning: ``python -m stretto.trainer.roles.supervised SPEC``.

It trains on demonstrations (the warm start, `stretto sft`) or on preferences (`stretto dpo`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.doors.loading import from_package
from stretto.model.device import memory_named, take_share
from stretto.model.hf.folder import load_policy, save_policy, saved_dtype
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.processes.channel import RoleEnd
from stretto.processes.heartbeat import begin_role
from stretto.processes.run_role import run_role
from stretto.trainer.config import OptimizerConfig, SupervisedConfig
from stretto.trainer.messages import Demonstrations, Examples, Stop, SupervisedDone, SupervisedSpec
from stretto.trainer.supervised import fine_tune

_TELL_SECONDS = 0.5
_EXAMPLES: msgspec.msgpack.Decoder[Examples] = msgspec.msgpack.Decoder(Examples)
_NO_ORDERS: msgspec.msgpack.Decoder[Stop] = msgspec.msgpack.Decoder(Stop)


def sender_of(channel: RoleEnd[Stop]) -> Callable[[SupervisedProgress], None]:
    """Return a function that sends progress to the conductor at most twice a second, and after the last step."""
    start = told = time.monotonic()

    def tell(progress: SupervisedProgress) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _TELL_SECONDS or progress.step == progress.steps:
            told = now
            channel.send(msgspec.structs.replace(progress, seconds=now - start))

    return tell


def learn(spec: SupervisedSpec, channel: RoleEnd[Stop]) -> None:
    """Load the model of `spec.model`, train it on `spec.examples`, save it to `spec.out`, and send `SupervisedDone`.

    Raises:
        OutOfMemory: the device has no memory left.
    """
    with memory_named(f"the {spec.role}", spec.gpus, 0, "while it trained on its examples"):
        _learn(spec, channel)


def _learn(spec: SupervisedSpec, channel: RoleEnd[Stop]) -> None:
    examples = _EXAMPLES.decode(Path(spec.examples).read_bytes())
    tell = sender_of(channel)
    config: OptimizerConfig
    if isinstance(examples, Demonstrations):
        config = shown = SupervisedConfig.model_validate_json(spec.config)
        model = _load(spec.model, config)
        fine_tune(model, examples.examples, shown, seed=spec.seed, progress=tell)
    else:
        prefer = from_package("stretto_app.extensions.preference_learning:learn", "preferences")
        model, config = prefer(spec, examples, _load, tell)
    start = Path(spec.model)
    save_policy(model, start, Path(spec.out), dtype=saved_dtype(config.save_dtype, start))
    channel.send(SupervisedDone())


def _load(folder: str, config: OptimizerConfig) -> PreTrainedModel:
    return load_policy(Path(folder), attention=PACKED_ATTENTION, dtype=torch.float32, device=config.device)


def main(arguments: list[str]) -> int:
    """Run the process; returns its exit code (`processes.run_role`). `arguments`: a `SupervisedSpec` as JSON."""
    spec = msgspec.json.decode(arguments[0], type=SupervisedSpec)
    begin_role()
    torch.set_num_threads(spec.threads)
    channel: RoleEnd[Stop] = RoleEnd(spec.descriptor, _NO_ORDERS)
    take_share(1.0)
    return run_role(lambda: learn(spec, channel), channel.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
