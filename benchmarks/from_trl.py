"""Check of docs/tutorials/from_trl.md: the same three training steps in trl and in stretto, weight by weight.

    python -m benchmarks.from_trl          makes trl's environment the first time

Both sides get one model, whose weights are computed by a rule, and the same answers with the same rewards. Nothing is
sampled, so only the training is compared. A case has the arguments of `GRPOConfig` and the corresponding keys of a
recipe. The result keeps fingerprints of trl's weights (two numbers for each parameter and step), with which
tests/benchmarks/test_from_trl.py checks stretto's trainer without trl.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.peers.environment import Environment
from benchmarks.report import Table, save
from stretto.core.records import (
    Batch,
    Completion,
    Group,
    Outcome,
    Prompt,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
)
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy, save_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer

SCRIPT = Path(__file__).parent / "peers" / "trl_weights.py"
STEPS, GROUPS, ANSWERS, LONGEST = 3, 3, 4, 7
MODEL = BuildConfig(
    alphabet="0123456789", hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24,
    context_length=32, tie_embeddings=False,
)  # fmt: skip

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One or more rows of the page: arguments of `GRPOConfig`, and the sections `[trainer]` and `[algorithm]` that
    correspond to them."""

    trl: dict[str, Any]
    trainer: dict[str, Any]
    algorithm: dict[str, Any]
    same: bool = True  # False: the page says that and why they differ


#: What trl does by default and a recipe has to say, but for the learning rate, which is large enough to be seen.
_TRL = {
    "learning_rate": 1e-3,
    "bf16": False,
    "per_device_train_batch_size": GROUPS * ANSWERS,
    "num_generations": ANSWERS,
    "max_completion_length": LONGEST,
    "scale_rewards": "none",
}
_TRAINER = {
    "steps": STEPS,
    "learning_rate": 1e-3,
    "schedule": "linear",
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "minibatches": 1,
}
_BESSEL = math.sqrt((ANSWERS - 1) / ANSWERS)  # trl divides by the deviation of a sample
_ALGORITHM = {"advantages": "group_mean", "correction": "none"}


def _case(trl: Mapping[str, Any], same: bool = True, **sections: Any) -> Case:
    algorithm = {**_ALGORITHM, **sections.pop("algorithm", {})}
    return Case({**_TRL, **trl}, {**_TRAINER, **sections.pop("trainer", {})}, algorithm, same)


CASES = {
    "dapo": _case({}),
    "grpo": _case({"loss_type": "grpo"}, algorithm={"aggregation": "sequence_mean"}),
    "dr_grpo": _case({"loss_type": "dr_grpo"}, algorithm={"aggregation": "fixed_length"}),
    "cispo": _case({"loss_type": "cispo", "epsilon_high": 5.0}, algorithm={"loss": "cispo"}),
    "sapo": _case({"loss_type": "sapo"}, algorithm={"loss": "sapo", "aggregation": "sequence_mean"}),
    "gspo": _case({"importance_sampling_level": "sequence"}, algorithm={"loss": "gspo"}),
    "delta": _case({"delta": 3.0}, algorithm={"loss": "dual_clip"}),
    "accumulated": _case(
        {"per_device_train_batch_size": GROUPS * ANSWERS // 3, "gradient_accumulation_steps": 3},
        trainer={"micro_batch_tokens": 40},
    ),
    "weight decay": _case({"weight_decay": 0.1}, trainer={"weight_decay": 0.1}),
    "cosine": _case({"lr_scheduler_type": "cosine"}, trainer={"schedule": "cosine"}),
    "reference": _case(
        {"beta": 0.5, "use_bias_correction_kl": False}, algorithm={"reference": {"estimator": "k3", "weight": 0.5}}
    ),
    "reference, corrected": _case(
        {"beta": 0.5}, same=False, algorithm={"reference": {"estimator": "k3", "weight": 0.5}}
    ),
    "temperature": _case({"temperature": 0.7}),
    "scaled by group": _case(
        {"scale_rewards": "group"}, algorithm={"advantages": {"kind": "group", "eps": 1e-4 * _BESSEL}}
    ),
    "scaled by batch": _case({"scale_rewards": "batch"}, algorithm={"advantages": "lite_ppo"}),
    "warm-up": _case({"warmup_steps": 2}, same=False, trainer={"warmup_steps": 2}),
}  # fmt: skip


def reward_of(answer: tuple[int, ...]) -> float:
    return sum(answer) % 3 / 2


def answers() -> list[list[tuple[tuple[int, ...], list[tuple[int, ...]]]]]:
    """For each step its groups, each a prompt and its answers of 1 to 7 tokens; the same on every machine."""
    rng = random.Random(1)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, len(MODEL.vocabulary)) for _ in range(count))

    return [
        [(drawn(2 + g), [drawn(rng.randint(1, LONGEST)) for _ in range(ANSWERS)]) for g in range(GROUPS)]
        for _ in range(STEPS)
    ]


def write_model(folder: Path) -> None:
    """Write the model, with weights that do not come from torch's random generator, so that they are equal on every
    machine."""
    build_policy(MODEL, folder, seed=1)
    model = load_policy(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            rng, middle = random.Random(name), float(weight.dim() == 1)
            drawn = [middle + rng.uniform(-0.4, 0.4) for _ in range(weight.numel())]
            weight.copy_(torch.tensor(drawn).view_as(weight))
    save_policy(model, folder, folder)


def batch(step: int, groups: list[tuple[tuple[int, ...], list[tuple[int, ...]]]]) -> Batch:
    return Batch(step=step, version=step, groups=tuple(_group(step, g, *one) for g, one in enumerate(groups)))


def _group(step: int, g: int, prompt: tuple[int, ...], members: list[tuple[int, ...]]) -> Group:
    trajectories = []
    for m, ids in enumerate(members):
        completion = Completion(
            str(g),
            m,
            Segment.of(
                token_ids=ids,
                behavior_logprobs=(-1.0,) * len(ids),
                versions=(step,) * len(ids),
                stop_reason=StopReason.LENGTH,
            ),
        )
        verdict = Verdict(outcome=Outcome.RIGHT, reward=reward_of(ids))
        trajectories.append(Trajectory(id=f"{g}/{m}", segments=(completion.segment,), verdict=verdict, text=""))
    asked = Prompt(id=str(g), token_ids=prompt, text="", answer="")
    return Group(id=str(g), prompt=asked, admitted_version=step, trajectories=tuple(trajectories))


def ours(folder: Path, case: Case) -> list[dict[str, Tensor]]:
    """Train with stretto; return the weights before the first step and after each."""

    def policy() -> PreTrainedModel:
        return load_policy(folder, attention=PACKED_ATTENTION)

    config, algorithm = TrainerConfig(**case.trainer), AlgorithmConfig(**case.algorithm)
    sampling = Sampling(max_tokens=LONGEST, temperature=case.trl.get("temperature", 1.0))
    reference = ReferencePolicy(policy(), config, sampling) if algorithm.reference else None
    trainer = Trainer(policy(), config, algorithm, sampling, reference=reference)
    seen = [_copy(trainer)]
    for step, groups in enumerate(answers()):
        trainer.train(batch(step, groups))
        seen.append(_copy(trainer))
    return seen


def _copy(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.full_parameters()}


def prints(start: Weights, weights: Weights) -> list[float]:
    """Fingerprints of the weights: for each parameter its distance from the start, and its movement along a direction
    derived from its name."""
    found = []
    for name, before in sorted(start.items()):
        moved, rng = (weights[name] - before).double().flatten(), random.Random(f"direction of {name}")
        direction = torch.tensor([rng.uniform(-1, 1) for _ in range(len(moved))], dtype=torch.float64)
        found += [float(moved.norm()), float(moved @ direction)]
    return found


def difference(start: Weights, left: Weights, right: Weights) -> float:
    """|left - right| over the larger movement of both since the start, over all weights."""

    def distance(one: Weights, other: Weights) -> float:
        return math.sqrt(math.fsum(float((one[name] - other[name]).double().square().sum()) for name in start))

    return distance(left, right) / max(distance(left, start), distance(right, start))


def measure(folder: Path) -> dict[str, Any]:
    model, out, order = folder / "model", folder / "out", folder / "order.json"
    out.mkdir()
    write_model(model)
    order.write_text(json.dumps({"batches": answers(), "cases": {name: case.trl for name, case in CASES.items()}}))
    report = Environment("trl").measure(SCRIPT, str(model), str(order), str(out), threads=1, seconds=900)
    table, rows = Table("case", "step 1", "step 2", "step 3"), {}
    for name, case in CASES.items():
        seen = ours(model, case)
        theirs = [load_file(out / f"{name}-{step}.safetensors") for step in range(1, STEPS + 1)]
        apart = [difference(seen[0], left, right) for left, right in zip(seen[1:], theirs, strict=True)]
        table.add(name, *(f"{one:.1e}" for one in apart))
        rows[name] = {
            "same": case.same,
            "difference": [float(f"{one:.3g}") for one in apart],
            "prints": [" ".join(f"{number:.7g}" for number in prints(seen[0], one)) for one in theirs],
        }
    table.show()
    return {"cases": rows, **report}


def summary(results: Mapping[str, Any]) -> str:
    """Table of docs/tutorials/from_trl.md."""
    lines = ["| case | step 1 | step 2 | step 3 | |", "|---|---|---|---|---|"]
    for name, row in results["cases"].items():
        apart = " | ".join(f"{one:.0e}" for one in row["difference"])
        lines.append(f"| {name} | {apart} | {'' if row['same'] else 'not the same'} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        save("from-trl", measure(Path(folder)))


if __name__ == "__main__":
    main()
