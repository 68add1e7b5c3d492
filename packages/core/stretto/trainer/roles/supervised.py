"""Process of supervised learning: ``python -m stretto.trainer.roles.supervised SPEC``.

It trains on demonstrations (the warm start, `stretto sft`), with the packing and the optimizer of RL: the loss is the
mean cross-entropy over the completion tokens of a batch, and does not depend on how they are packed. Prompts are
context, not in the loss. Preferences (`stretto dpo`) are learnt by the application.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.core.records import derive_seed
from stretto.doors.loading import from_package
from stretto.model.device import memory_named, take_share
from stretto.model.hf.folder import load_policy, save_policy, saved_dtype
from stretto.model.hf.layers import linear_layers
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens
from stretto.processes.channel import RoleEnd, run_role
from stretto.processes.heartbeat import begin_role
from stretto.trainer.batch.minibatch import micro_batches
from stretto.trainer.config import OptimizerConfig, SupervisedConfig
from stretto.trainer.messages import Demonstration, Demonstrations, Examples, Stop, SupervisedDone, SupervisedSpec
from stretto.trainer.optimizer import Learner, Muon, learning_rate


def fine_tune(
    model: PreTrainedModel,
    demonstrations: Sequence[Demonstration],
    config: SupervisedConfig,
    *,
    seed: int,
    progress: Callable[[SupervisedProgress], None] = lambda _: None,
) -> None:
    """Train `model` in place for `config.steps` steps. The model must be loaded with packed attention. `progress` is
    called after each step; its `seconds` are 0.

    Each pass over the demonstrations is in a new order that depends on `seed` alone.

    Raises:
        ValueError: there is no demonstration, or a demonstration has an empty prompt or completion.
        TrainingDiverged: `max_bad_steps` steps in a row had gradients that are not finite.
    """
    if not all(d.prompt_ids and d.completion_ids for d in demonstrations) or not demonstrations:
        raise ValueError("supervised fine-tuning needs demonstrations, each with a prompt and a completion")
    learner = Learner(model, config)
    matrices, on_host = [layer.weight for layer in linear_layers(model).values()], config.optimizer_states == "host"
    muon = Muon(matrices, on_host=on_host) if config.optimizer == "muon" else None
    batches = drawn(len(demonstrations), config.batch_size, seed)
    for step in range(config.steps):
        batch = [demonstrations[index] for index in next(batches)]
        loss = _accumulate(learner, batch, config)
        rate = learning_rate(config, step, config.steps)
        matrix_rate = config.matrix_learning_rate * rate / config.learning_rate
        learner.step(rate, step, before=partial(muon.step, matrix_rate) if muon is not None else None)
        progress(SupervisedProgress(step + 1, config.steps, loss))


def _accumulate(learner: Learner, batch: Sequence[Demonstration], config: SupervisedConfig) -> float:
    """Accumulate the gradient of the mean cross-entropy over the batch's completion tokens; returns that mean."""
    sequences = [d.prompt_ids + d.completion_ids for d in batch]
    completions = [range(len(d.prompt_ids), len(s)) for d, s in zip(batch, sequences, strict=True)]
    total = sum(len(completion) for completion in completions)
    loss = 0.0
    for pack in micro_batches([len(s) for s in sequences], config.micro_batch_tokens, config.min_micro_batches):
        packed = pack_tokens([sequences[i] for i in pack], [completions[i] for i in pack], learner.model.device)
        part = -learner.logprobs(packed).logprobs.sum() / total
        part.backward()
        loss += float(part.detach())
    return loss


def drawn(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of `batch_size` indices below `count` (at least 1) without end. Each pass over the indices is in a
    new random order, decided by `seed`; a batch may span two passes."""
    ahead: list[int] = []
    epoch = 0
    while True:
        while len(ahead) < batch_size:
            order = list(range(count))
            random.Random(derive_seed("demonstrations", seed, epoch)).shuffle(order)
            ahead += order
            epoch += 1
        yield ahead[:batch_size]
        del ahead[:batch_size]


_TELL_SECONDS = 0.5
_EXAMPLES: msgspec.msgpack.Decoder[Examples] = msgspec.msgpack.Decoder(Examples)
_NO_ORDERS: msgspec.msgpack.Decoder[Stop] = msgspec.msgpack.Decoder(Stop)


def sender_of(channel: RoleEnd[Stop]) -> Callable[[SupervisedProgress], None]:
    """Return a function that sends progress to the conductor, with the seconds since this call: at most twice a second,
    and after the last step. Calls in between are ignored."""
    start = told = time.monotonic()

    def tell(progress: SupervisedProgress) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _TELL_SECONDS or progress.step == progress.steps:
            told = now
            channel.send(msgspec.structs.replace(progress, seconds=now - start))

    return tell


def learn(spec: SupervisedSpec, channel: RoleEnd[Stop]) -> None:
    """Load the model of `spec.model`, train it on `spec.examples` (demonstrations, or preferences by stretto-app), save
    it to `spec.out`, and send `SupervisedDone`. Raises OutOfMemory if the device has no memory left; further as
    `fine_tune`."""
    with memory_named(f"the {spec.role}", spec.gpus, 0, "while it trained on its examples"):
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
    """Run the process; returns its exit code (`channel.run_role`). `arguments`: a `SupervisedSpec` as JSON."""
    spec = msgspec.json.decode(arguments[0], type=SupervisedSpec)
    begin_role()
    torch.set_num_threads(spec.threads)
    channel: RoleEnd[Stop] = RoleEnd(spec.descriptor, _NO_ORDERS)
    take_share(1.0)
    return run_role(lambda: learn(spec, channel), channel.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
