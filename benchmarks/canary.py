"""Cost of the canary: CPU time of its parts beside that of a step's work, measured in turns in one process.

    python -m benchmarks.canary               twelve rounds of each row: some minutes
    python -m benchmarks.canary --rounds 4

The trainer's part is its forward pass over the text; the digests are those of the publication. The engine's parts are
its forward pass over the text and the read-back of its memory, during which it samples nothing; and, if the trainer
compares too few of its tokens, recomputing them, at most for every third version. A step of the trainer is one batch of
the recipe's kind, a step of the engine the completions for it, of ten tokens on average. The step of a run takes as
long as the slower of the two. CPU time is measured, because the machine does other work too.

Both sides compute one text of 64 tokens, so the share falls with the tokens of a step. The steps of the arithmetic
recipe, 64 short completions with 0.7 thousand tokens in all, are as small as any.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from benchmarks.report import Table, save
from stretto.core.canary import text as canary_text
from stretto.core.records import (
    Batch,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
)
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber

_RECIPE = BuildConfig(
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=16,
    intermediate_size=128,
    context_length=256,
    alphabet="0123456789+-=",
    initializer_range=0.05,
)
_LARGER = _RECIPE.model_copy(update={"hidden_size": 256, "layers": 4, "head_dim": 64, "intermediate_size": 768})
MODELS: Mapping[str, BuildConfig] = {"0.1M": _RECIPE, "3.4M": _LARGER}
COMPLETIONS = (64, 512)
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
_PROMPT, _TOKENS, _GROUP = 8, 10, 8
_ASKED = 64  # tokens that are computed again
_WARM = 2  # rounds before those that count


@dataclass(frozen=True)
class Cost:
    """Medians over the rounds, in milliseconds of CPU time."""

    model: str
    dtype: str  # of the engine; the trainer's is float32
    completions: int
    train_ms: float
    generate_ms: float
    trainer_ms: float
    text_ms: float
    read_back_ms: float
    again_ms: float

    @property
    def step_ms(self) -> float:
        """CPU time of a step: that of the slower side."""
        return max(self.train_ms, self.generate_ms)

    @property
    def trainer_share(self) -> float:
        """Cost of the trainer's part, as a share of a step."""
        return self.trainer_ms / self.step_ms

    @property
    def engine_share(self) -> float:
        """Cost of the engine's parts, as a share of a step, if the trainer compares enough tokens."""
        return (self.text_ms + self.read_back_ms) / self.step_ms


class Bench:
    """A trainer and an engine of one model, in one process."""

    def __init__(self, model: str, dtype: Literal["float32", "bfloat16"], folder: Path) -> None:
        self._model, self._dtype = model, dtype
        policy = folder / "model"
        build_policy(MODELS[model], policy, seed=1)
        trained = load_policy(policy, attention=PACKED_ATTENTION, dtype=torch.float32)
        config = TrainerConfig(minibatches=2, learning_rate=1e-6)
        self._vocabulary = trained.config.vocab_size
        self._trainer = Trainer(trained, config, AlgorithmConfig(), Sampling(max_tokens=64))
        self._engine = NativeEngine.load(policy, EngineConfig(slots=128, dtype=dtype))
        self._publisher = SharedMemoryPublisher("canary", folder / "mailbox", getattr(torch, dtype))
        self._subscriber = SharedMemorySubscriber("canary", folder / "mailbox")
        self._text = canary_text(self._vocabulary, MODELS[model].context_length, {1}, 1)
        self._chance = random.Random(1)

    def measure(self, rounds: int) -> list[Cost]:
        """One row for each size of a step. In every round, each part of it takes its turn."""
        found: dict[tuple[int, str], list[float]] = {}

        def timed(completions: int, part: str, work: Callable[[], object]) -> None:
            start = time.thread_time()
            work()
            found.setdefault((completions, part), []).append(1000 * (time.thread_time() - start))

        for _ in range(rounds + _WARM):
            for completions in COMPLETIONS:
                batch = self._batch(completions)
                timed(completions, "train", lambda batch=batch: self._trainer.train(batch))  # type: ignore[misc]
                timed(completions, "trainer", lambda: self._trainer._canary(self._text))
                canary = self._trainer.publish(self._publisher, self._text, getattr(torch, self._dtype))
                assert canary is not None
                self._engine.update(canary.version, self._subscriber.load(canary.version))
                timed(completions, "text", lambda canary=canary: self._engine._prover.text(canary.token_ids))  # type: ignore[misc]
                digests = canary.digests
                timed(completions, "read", lambda one=digests: self._engine._parameters.differing(one))  # type: ignore[misc]
                assert self._engine.prove(canary).compared == len(canary.digests)
                self._request(completions)
                for _ in range(_TOKENS // 2):
                    self._engine.step()
                timed(completions, "again", lambda: self._engine.look_back(_ASKED))
                self._finish()
                self._request(completions)
                timed(completions, "generate", self._finish)
        return [self._cost(completions, found) for completions in COMPLETIONS]

    def _cost(self, completions: int, found: Mapping[tuple[int, str], list[float]]) -> Cost:
        parts = ("train", "generate", "trainer", "text", "read", "again")
        return Cost(self._model, self._dtype, completions, *(median(found[completions, one][_WARM:]) for one in parts))

    def _request(self, completions: int) -> None:
        sampling = Sampling(max_tokens=_TOKENS)
        for group in range(completions // _GROUP):
            self._engine.add(GenerateRequest(str(group), self._tokens(_PROMPT), tuple(range(_GROUP)), sampling))

    def _finish(self) -> None:
        while not self._engine.idle:
            self._engine.step()

    def _batch(self, completions: int) -> Batch:
        version, groups = self._trainer.version, []
        for number in range(completions // _GROUP):
            prompt = Prompt(str(number), self._tokens(_PROMPT), "", "")
            members = [
                Trajectory(f"{number}/{member}", (self._segment(version),), _verdict(member), "")
                for member in range(_GROUP)
            ]
            groups.append(Group(str(number), prompt, version, tuple(members)))
        return Batch(version + 1, version, tuple(groups))

    def _segment(self, version: int) -> Segment:
        tokens = self._tokens(self._chance.randint(_TOKENS // 2, _TOKENS + _TOKENS // 2))
        return Segment.of(tokens, (-3.0,) * len(tokens), (version,) * len(tokens), stop_reason=StopReason.STOP)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(2, self._vocabulary) for _ in range(count))


def _verdict(member: int) -> Verdict:
    return Verdict(outcome=Outcome.RIGHT if member % 2 else Outcome.WRONG, reward=float(member % 2))


def main() -> None:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    costs: list[Cost] = []
    for model in MODELS:
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory(prefix="stretto-canary-") as folder:
                costs += Bench(model, dtype, Path(folder)).measure(rounds)
    names = ("train", "generate", "trainer", "of a step", "text", "read back", "of a step ", "again")
    table = Table("model", "engine", "completions", *names)
    for one in costs:
        times = one.train_ms, one.generate_ms, one.trainer_ms, one.text_ms, one.read_back_ms, one.again_ms
        train, generate, trainer, text, read_back, again = (f"{ms:.2f}" for ms in times)
        shares = f"{one.trainer_share:.2%}", f"{one.engine_share:.2%}"
        rest = (train, generate, trainer, shares[0], text, read_back, shares[1], again)
        table.add(one.model, one.dtype, one.completions, *rest)
    table.show()
    rows = [asdict(one) | {"trainer_share": one.trainer_share, "engine_share": one.engine_share} for one in costs]
    print(save("canary", {"rounds": rounds, "unit": "milliseconds of CPU time", "costs": rows}))


if __name__ == "__main__":
    main()
