"""Process of supervised learning: ``python -m stretto.trainer.roles.supervised SPEC``.

It trains on demonstrations (the warm start, `stretto sft`) or on preferences (`stretto dpo`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec
import torch
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.model.device import memory_named, take_share
from stretto.model.hf.folder import load_policy, save_policy, saved_dtype
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.processes.channel import RoleEnd
from stretto.processes.heartbeat import begin_role
from stretto.processes.run_role import run_role
from stretto.trainer.config import OptimizerConfig, PreferenceConfig, SupervisedConfig
from stretto.trainer.messages import Demonstrations, Examples, Preferences, Stop, SupervisedDone, SupervisedSpec
from stretto.trainer.supervised import fine_tune, prefer

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
    match examples:
        case Demonstrations():
            shown = SupervisedConfig.model_validate_json(spec.config)
            model, wanted = _load(spec.model, shown), shown.save_dtype
            fine_tune(model, examples.examples, shown, seed=spec.seed, progress=tell)
        case Preferences():
            liked = PreferenceConfig.model_validate_json(spec.config)
            model, wanted = _load(spec.model, liked), liked.save_dtype
            reference = _load(examples.reference, liked)
            prefer(model, reference, examples.pairs, liked, seed=spec.seed, progress=tell)
        case _:
            assert_never(examples)
    start = Path(spec.model)
    save_policy(model, start, Path(spec.out), dtype=saved_dtype(wanted, start))
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
