"""Weights of trl's `GRPOTrainer` after each of a few steps, on given answers and with given settings.

Runs under the interpreter that `environment.py trl` prints and imports nothing of stretto:

    PEER=$(python benchmarks/peers/environment.py trl)
    "$PEER" benchmarks/peers/trl_weights.py MODEL ORDER.json OUT

ORDER holds `batches`, each a list of groups ``[prompt ids, [answer ids, ...]]``, and `cases`: the arguments of
`GRPOConfig` by name of the case. Weights go to ``OUT/<case>-<step>.safetensors``. The last line is a JSON object:
versions, the defaults of `GRPOConfig`, and which of them differ from those of transformers' `TrainingArguments`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its word about `rollout_func`

import torch
from datasets import Dataset, disable_progress_bars
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig


def reward_of(answer: list[int]) -> float:
    return sum(answer) % 3 / 2


@dataclass
class Answers:
    """A `rollout_func` for trl that returns the batches in their order."""

    batches: list[list[tuple[list[int], list[list[int]]]]]
    asked: int = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        groups = self.batches[self.asked]
        self.asked += 1
        return {
            "prompt_ids": [prompt for prompt, answers in groups for _ in answers],
            "completion_ids": [answer for _, answers in groups for answer in answers],
            "logprobs": [[-1.0] * len(answer) for _, answers in groups for answer in answers],
        }


@dataclass
class Keep(TrainerCallback):
    """Writes the weights after each optimizer step."""

    place: Path
    case: str

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        weights = {name: value.detach().clone() for name, value in kwargs["model"].named_parameters()}
        save_file(weights, self.place / f"{self.case}-{state.global_step}.safetensors")


def train(model: Path, batches: list[Any], case: str, settings: dict[str, Any], out: Path) -> None:
    answers = sum(len(group[1]) for group in batches[0])
    with tempfile.TemporaryDirectory() as scratch:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=lambda completion_ids, **_: [reward_of(list(ids)) for ids in completion_ids],
            rollout_func=Answers(batches),
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                max_steps=len(batches),
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **settings,
            ),
            train_dataset=Dataset.from_list([{"prompt": str(k)} for k in range(answers)]),
            callbacks=[Keep(out, case)],
        ).train()


def defaults() -> dict[str, Any]:
    """Defaults of `GRPOConfig` that are plain values; bf16 as on a GPU that supports it."""
    config = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return {
        **{k: v for k, v in plain.items() if v is None or isinstance(v, bool | int | float | str)},
        "output_dir": None,
        "use_cpu": False,
        "bf16": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="weights of trl's GRPOTrainer")
    parser.add_argument("model", type=Path)
    parser.add_argument("order", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    disable_progress_bars()
    order = json.loads(words.order.read_text())
    for case, settings in order["cases"].items():
        train(words.model, order["batches"], case, settings, words.out)
    of_transformers = {one.name for one in fields(TrainingArguments)}
    report = {
        "versions": {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
        "defaults": defaults(),
        "own": sorted(one.name for one in fields(GRPOConfig) if one.name not in of_transformers),
        "async_max_staleness": AsyncGRPOConfig.__dataclass_fields__["max_staleness"].default,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
