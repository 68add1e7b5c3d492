"""Trainings by 1, 2 and 3 ranks, real processes each: ``python -m tests.trainer.rank_runs FOLDER``.

For every scenario ``FOLDER/COUNT-SCENARIO-RANK.pt`` holds what that rank saw. Models of several ranks begin without
memory, and are filled from ``FOLDER/tiny`` and ``FOLDER/tied``. ``FOLDER/models`` holds a folder for each family, and
``large`` of 48M parameters: ``FOLDER/2-RANK.pt`` is what two ranks made of them, ``FOLDER/2-saved`` a policy that they
have saved.
"""

import math
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
from stretto.model.hf.layers import decoder_layers
from stretto.store.series.tokens import SampledTokens
from stretto.trainer.adapters import adapt
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.outcomes import TokenSink, TrainedTokens
from stretto.trainer.ranks import ALONE, Ranks
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from stretto_cluster.ranks.collectives import ShardedRanks, join, reach_store
from tests.tolerances import EPS, RATE
from tests.trainer.batches import LONGEST, batch
from tests.trainer.several_ranks import fork_ranks, prepare
from tests.trainer.staging import staged
from tests.trainer.tiny import tiny
from tests.trainer.unloaded import FIRST, beyond_the_shards, filled, save, unloaded

SAMPLING = Sampling(max_tokens=LONGEST)


@dataclass(frozen=True)
class Scenario:
    """What is trained, and how."""

    steps: int = 2
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = SAMPLING
    tied: bool = False
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


#: In the second step one of two ranks has a pack less to score.
UNEVEN = {"micro_batch_tokens": 15}

SCENARIOS = {
    "paper": Scenario(algorithm={"correction": {"kind": "mask", "high": 4.0}}, tied=True),
    "few": Scenario(steps=1, trainer={"minibatches": 6}),  # two answers in each: the third rank has nothing to do
    "small": Scenario(algorithm={"aggregation": "sequence_mean", "loss": "gspo"}, trainer={"micro_batch_tokens": 24}),
    "critic": Scenario(algorithm={"advantages": {"kind": "gae", "critic": {"learning_rate": RATE}}}, trainer=UNEVEN),
    "selection": Scenario(
        algorithm={
            "loss": {"kind": "m2po", "threshold": 0.5},
            "advantages": "batch",
            "reference": {"weight": 0.1, "into": "reward"},
        },
        trainer=UNEVEN,
    ),
    "reference": Scenario(
        algorithm={"reference": {"weight": 0.1}, "entropy": True, "entropy_bonus": 0.01},
        trainer={"activation_checkpointing": True},
    ),
    "adapters": Scenario(trainer={"lora": {"rank": 2}}, algorithm={"reference": {"weight": 0.1}}),
    "poisoned": Scenario(algorithm={"loss": "ppo"}, batch=poisoned),
    "once": Scenario(trainer={"reduce_every": "minibatch", "micro_batch_tokens": 24}),
    "half": Scenario(
        trainer={"dtype": "bfloat16"}, algorithm={"advantages": {"kind": "gae", "critic": {"learning_rate": RATE}}}
    ),
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


def settings(scenario: Scenario) -> TrainerConfig:
    return TrainerConfig.model_validate({"learning_rate": RATE, "eps": EPS, "minibatches": 2, **scenario.trainer})


def trainer_of(
    scenario: Scenario, ranks: Ranks, load: Callable[[], PreTrainedModel] | None = None, sink: TokenSink | None = None
) -> Trainer:
    """The scenario's trainer at version 0; `load` makes its models."""
    config, algorithm = settings(scenario), AlgorithmConfig.model_validate(scenario.algorithm)
    load = load or partial(tiny, tied=scenario.tied)
    model = load()
    if config.lora is not None:
        adapt(model, config.lora)
    wanted = algorithm.reference is not None and config.lora is None
    reference = ReferencePolicy(load(), config, scenario.sampling, ranks) if wanted else None
    critic = Critic(load(), config, algorithm.critic, ranks) if algorithm.critic else None
    return Trainer(
        model, config, algorithm, scenario.sampling, reference=reference, critic=critic, ranks=ranks, sink=sink
    )


def loader(scenario: Scenario, ranks: Ranks, folder: Path) -> Callable[[], PreTrainedModel] | None:
    """Of models without memory where there are several ranks."""
    return partial(unloaded, folder / ("tied" if scenario.tied else "tiny")) if ranks.count > 1 else None


def play(scenario: Scenario, ranks: Ranks, folder: Path, name: str) -> None:
    """Train, and write down what this rank saw. AdamW's first moment is a tenth of the gradient after one step."""
    sink, streams = KeptTokens(), list[torch.dtype]()
    trainer = trainer_of(scenario, ranks, loader(scenario, ranks, folder), sink)
    first = decoder_layers(trainer.learner.model)[0]
    first.register_forward_hook(lambda module, inputs, output: streams.append(output.dtype))
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
        "streams": list(set(streams)),
        "tokens": [{id: columns_of(one) for id, one in step.items()} for step in sink.steps],
    }
    torch.save(seen, folder / f"{ranks.count}-{name}-{ranks.rank}.pt")


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
    trainer = trainer_of(replace(scenario, trainer=states), ranks, loader(scenario, ranks, folder))
    name = resumed.name
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
    ranks, models = join(reach_store(port, count), rank, count, "cpu"), folder / "models"
    if count == 2:
        beyond = beyond_the_shards(models / "large", ranks)
        whole = {one.name: filled(one, ranks) for one in models.iterdir() if one.name != "large"}
        torch.save({"beyond": beyond, "filled": whole}, folder / f"{count}-{rank}.pt")
        save(models / FIRST, ranks, folder / f"{count}-saved")
    for name in PLAYED[count]:
        play(SCENARIOS[name], ShardedRanks("cpu", settings(SCENARIOS[name])), folder, name)
    play_resumed(ranks, folder, [one for one in RESUMED if one.ranks == count])
    torch.distributed.destroy_process_group()


def play_resumed(ranks: Ranks, folder: Path, several: Sequence[Resumed]) -> None:
    with staged():
        for resumed in several:
            play_on(SCENARIOS["critic"], ranks, folder, resumed)


def main() -> None:
    folder = prepare()
    for name in ("tiny", "tied"):
        tiny(tied=name == "tied").save_pretrained(folder / name)
    play_resumed(ALONE, folder, RESUMED[:1])
    for count in PLAYED:
        fork_ranks(count, play_all, folder)
    play_resumed(ALONE, folder, [one for one in RESUMED[1:] if one.ranks == 1])
    for name, scenario in SCENARIOS.items():
        play(scenario, ALONE, folder, name)


if __name__ == "__main__":
    main()
