"""Trainings by 1, 2 and 3 ranks, real processes each: ``python -m tests.trainer.rank_runs FOLDER``.

For every scenario ``FOLDER/COUNT-SCENARIO-RANK.pt`` holds what that rank saw. The processes
are forked, so that torch is imported once.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling, Segment
from stretto.store.series.tokens import SampledTokens
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.outcomes import TokenSink, TrainedTokens
from stretto.trainer.parallel.lora import adapt
from stretto.trainer.parallel.ranks import ALONE, Ranks
from stretto.trainer.parallel.rendezvous import join, open_store, reach_store
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from tests.tolerances import EPS, RATE
from tests.trainer.batches import LONGEST, batch
from tests.trainer.staging import staged
from tests.trainer.tiny import tiny

SAMPLING = Sampling(max_tokens=LONGEST)


@dataclass(frozen=True)
class Scenario:
    """What is trained, and how."""

    steps: int = 2
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = SAMPLING
    model: Callable[[], PreTrainedModel] = tiny
    batch: Callable[[int], Batch] = batch


def poisoned(version: int) -> Batch:
    """In step 1 the first answer's log-probabilities are no numbers."""
    given = batch(version)
    if version != 1:
        return given
    (first, *others), rest = given.groups[0].trajectories, given.groups[1:]
    (segment,) = first.segments
    logprobs = tuple(math.nan for _ in segment.behavior_logprobs)
    bad = msgspec.structs.replace(first, segments=(Segment.of(segment.token_ids, logprobs, segment.versions),))
    group = msgspec.structs.replace(given.groups[0], trajectories=(bad, *others))
    return msgspec.structs.replace(given, groups=(group, *rest))


SCENARIOS = {
    "paper": Scenario(algorithm={"correction": {"kind": "mask", "high": 4.0}}, model=partial(tiny, tied=True)),
    "few": Scenario(steps=1, trainer={"minibatches": 6}),  # two answers in each: the third rank has nothing to do
    "small": Scenario(algorithm={"aggregation": "sequence_mean", "loss": "gspo"}, trainer={"micro_batch_tokens": 24}),
    "critic": Scenario(algorithm={"advantages": {"kind": "gae", "critic": {"learning_rate": RATE}}}),
    "selection": Scenario(
        algorithm={
            "loss": {"kind": "m2po", "threshold": 0.5},
            "advantages": "batch",
            "reference": {"weight": 0.1, "into": "reward"},
        }
    ),
    "reference": Scenario(
        algorithm={"reference": {"weight": 0.1}, "entropy": True, "entropy_bonus": 0.01},
        trainer={"activation_checkpointing": True},
    ),
    "adapters": Scenario(trainer={"lora": {"rank": 2}}, algorithm={"reference": {"weight": 0.1}}),
    "poisoned": Scenario(algorithm={"loss": "ppo"}, batch=poisoned),
}

#: A loss of each token alone, one of sequences, and one that chooses over the minibatch of all ranks, an optimizer step
#: each. To others ranks are micro-batches, which change no gradient (test_objectives.py).
LOSSES = ("cispo", "topr", "m2po")
SCENARIOS |= {loss: Scenario(steps=1, algorithm={"loss": loss}, trainer={"minibatches": 1}) for loss in LOSSES}

#: What each number of ranks trains; 1 rank trains all.
PLAYED = {3: ("few",), 2: tuple(name for name in SCENARIOS if name != "few")}


@dataclass(frozen=True)
class Resumed:
    """Ranks that go on from the checkpoint `start`, or begin, and write the checkpoint `name` a step later. `apart`:
    only rank 0 sees the folder, as on machines of their own. `host`: with moments in host memory."""

    ranks: int
    start: str | None
    name: str
    apart: bool = False
    host: bool = False


#: In the order in which they are trained: 1, 3, 2 and 1 ranks, each from the checkpoint of those before.
RESUMED = (
    Resumed(1, None, "1"),
    Resumed(3, "1", "1-3-apart", apart=True),
    Resumed(2, "1-3-apart", "1-3-2", host=True),
    Resumed(2, "1-3-apart", "1-3-2-device"),
    Resumed(1, "1-3-2", "1-3-2-1"),
    Resumed(1, "1", "1-1"),
    Resumed(1, "1-1", "1-1-1", host=True),
    Resumed(1, "1-1-1", "1-1-1-1"),
)


class KeptTokens:
    """Keeps what was recorded of the tokens of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, SampledTokens]] = []

    def keeps(self, step: int) -> bool:
        return step % 2 == 0

    def take(self, tokens: TrainedTokens) -> None:
        self.steps.append(divided(*tokens.sampled()))


def trainer_of(scenario: Scenario, ranks: Ranks, sink: TokenSink | None = None) -> Trainer:
    """The scenario's trainer at version 0."""
    config = TrainerConfig.model_validate({"learning_rate": RATE, "eps": EPS, "minibatches": 2, **scenario.trainer})
    algorithm = AlgorithmConfig.model_validate(scenario.algorithm)
    model = scenario.model()
    if config.lora is not None:
        adapt(model, config.lora)
    wanted = algorithm.reference is not None and config.lora is None
    reference = ReferencePolicy(scenario.model(), config, scenario.sampling, ranks) if wanted else None
    critic = Critic(scenario.model(), config, algorithm.critic, ranks) if algorithm.critic else None
    return Trainer(
        model, config, algorithm, scenario.sampling, reference=reference, critic=critic, ranks=ranks, sink=sink
    )


def play(scenario: Scenario, ranks: Ranks, file: Path) -> None:
    """Train, and write down what this rank saw. AdamW's first moment is a tenth of the gradient after one step."""
    sink = KeptTokens()
    trainer = trainer_of(scenario, ranks, sink)
    updates = [trainer.train(scenario.batch(version)) for version in range(scenario.steps)]
    weights = dict(trainer.full_parameters())
    facts = [{name: v for name, v in u.metrics.items() if not name.startswith("seconds")} for u in updates]
    own = sum(ranks_own(p) for p in trainer.learner.model.parameters())
    state, trained = trainer.learner.adamw.state, trainer.learner.model.named_parameters()
    moments = {name: ranks.full_tensor(state[p]["exp_avg"]) for name, p in trained if p.requires_grad}
    seen = {
        "metrics": facts,
        "skipped": [u.skipped for u in updates],
        "weights": weights,
        "moments": moments,
        "own": own,
        "tokens": [{id: columns_of(one) for id, one in step.items()} for step in sink.steps],
    }
    torch.save(seen, file)


def divided(lengths: Mapping[str, int], tokens: SampledTokens) -> dict[str, SampledTokens]:
    """By trajectory."""
    ends = list(accumulate(lengths.values()))[:-1]
    parts = [np.split(column, ends) for column in columns_in(tokens)]
    return {id: SampledTokens(*one) for id, *one in zip(lengths, *parts, strict=True)}


def columns_in(tokens: SampledTokens) -> tuple[NDArray[Any], ...]:
    return tokens.trainer_logprob, tokens.ratio, tokens.advantage, tokens.outcome


def columns_of(tokens: SampledTokens) -> torch.Tensor:
    """[S, 4]"""
    return torch.stack([torch.tensor(column, dtype=torch.float32) for column in columns_in(tokens)], dim=1)


def play_on(scenario: Scenario, ranks: Ranks, folder: Path, resumed: Resumed) -> None:
    """Go on, a step; write the checkpoint while training goes on, and the weights that it should hold."""
    states = {"optimizer_states": "host" if resumed.host else "device"}
    trainer, name = trainer_of(replace(scenario, trainer=states), ranks), resumed.name
    if resumed.apart and ranks.rank > 0:
        folder /= "not-there"
    if resumed.start is not None:
        trainer.load_checkpoint(folder / resumed.start)
    trainer.train(scenario.batch(trainer.version))
    weights = {name: weight.clone() for name, weight in trainer.full_parameters()}
    writing = Thread(target=trainer.snapshot(), args=(folder / name,))
    writing.start()
    trainer.train(scenario.batch(trainer.version))
    writing.join()
    if ranks.rank == 0:
        torch.save({"weights": weights}, folder / f"{name}.pt")


def ranks_own(parameter: torch.Tensor) -> int:
    """Numbers of a parameter that this rank holds."""
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.numel()


def play_all(folder: Path, rank: int, count: int, port: int) -> None:
    """As one rank of several."""
    ranks = join(reach_store(port, count), rank, count, "cpu")
    for name in PLAYED[count]:
        play(SCENARIOS[name], ranks, folder / f"{count}-{name}-{rank}.pt")
    with staged():
        for resumed in (one for one in RESUMED if one.ranks == count):
            play_on(SCENARIOS["critic"], ranks, folder, resumed)
    torch.distributed.destroy_process_group()


def play_alone(folder: Path, several: Sequence[Resumed]) -> None:
    with staged():
        for resumed in several:
            play_on(SCENARIOS["critic"], ALONE, folder, resumed)


def main() -> None:
    """Warnings are errors."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    play_alone(folder, RESUMED[:1])
    for count in PLAYED:
        store = open_store(count)  # in the parent: all ranks are its children
        forked = multiprocessing.get_context("fork")
        processes = [forked.Process(target=play_all, args=(folder, rank, count, store.port)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(f"{count} ranks: one ended with exit code {process.exitcode}")
    play_alone(folder, [one for one in RESUMED[1:] if one.ranks == 1])
    for name, scenario in SCENARIOS.items():
        play(scenario, ALONE, folder / f"1-{name}-0.pt")


if __name__ == "__main__":
    main()
