"""How fast trl's `GRPOTrainer` trains on answers of given lengths: its step alone, without generation.

Runs under the interpreter that `environment.py trl` prints and imports nothing of stretto:

    PEER=$(python benchmarks/peers/environment.py trl)
    "$PEER" benchmarks/peers/trl_step.py MODEL benchmarks/data/lengths.json --rows 16 --steps 8 --warm 2

The answers come from a `rollout_func` that has them ready. The trainer's work before a step (decoding them, rewards,
advantages, padding) does not count: the clock runs from then to the end of the optimizer step. `--rows` rows pass
through the model at a time, and gradients are accumulated over the batch. Prints one JSON object as the last line.

Settings chosen in the peer's favour: no reference model, no gradient checkpointing, no saving, no logging while the
clock runs, no data-loader workers, sdpa attention.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its word about `rollout_func`

import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Measurement:
    """Result of one run. Example: ``{"tokens_per_second": 702.4, "seconds_of_each_step": [1.9, ...], ...}``"""

    tokens_per_second: float  # trained, over the measured steps
    seconds_of_each_step: tuple[float, ...]
    settings: dict[str, str | int | float]
    versions: dict[str, str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the training step of trl's GRPOTrainer")
    parser.add_argument("model", type=Path, help="Hugging Face model folder, tokenizer included")
    parser.add_argument("lengths", type=Path, help="JSON: batches of groups, each [prompt tokens, answer tokens, ...]")
    parser.add_argument("--rows", type=int, default=64, help="answers in one forward")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--warm", type=int, default=2, help="steps before them that are not")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser.parse_args()


@dataclass
class Answers:
    """A `rollout_func` for trl: batch after batch of random tokens, with the lengths in the file."""

    batches: list[list[list[int]]]
    vocabulary: int
    asked: int = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        groups, rng = self.batches[self.asked], random.Random(self.asked)
        self.asked += 1
        pairs = [(self._drawn(rng, prompt), [self._drawn(rng, n) for n in answers]) for prompt, *answers in groups]
        completions = [answer for _, answers in pairs for answer in answers]
        if len(completions) != len(prompts):
            raise SystemExit(f"{len(prompts)} answers are wanted, and a batch of the file has {len(completions)}")
        return {
            "prompt_ids": [prompt for prompt, answers in pairs for _ in answers],
            "completion_ids": completions,
            "logprobs": [[-7.0] * len(completion) for completion in completions],
        }

    def _drawn(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(2, self.vocabulary) for _ in range(count)]


class Timed(GRPOTrainer):  # type: ignore[misc]
    """Trainer that also adds up the seconds it spends preparing its inputs."""

    prepared = 0.0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        began = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self.prepared += time.perf_counter() - began
        return inputs


@dataclass
class Watch(TrainerCallback):
    """Seconds of each optimizer step, without the preparation of its inputs."""

    trainer: Timed | None = None
    seconds: list[float] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def _clock(self) -> tuple[float, float]:
        return time.perf_counter(), self.trainer.prepared if self.trainer else 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began = self._clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now, prepared = self._clock()
        self.seconds.append(now - self._began[0] - (prepared - self._began[1]))


def measure(options: argparse.Namespace) -> Measurement:
    torch.set_num_threads(options.threads)
    disable_progress_bars()
    set_seed(1)
    steps = options.warm + options.steps
    batches = json.loads(options.lengths.read_text())["batches"][:steps]
    answers, group = sum(len(one) - 1 for one in batches[0]), len(batches[0][0]) - 1
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa")
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        watch.trainer = Timed(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            reward_funcs=lambda completions, **_: [float(k % 2) for k in range(len(completions))],
            rollout_func=Answers(batches, model.config.vocab_size),
            args=GRPOConfig(output_dir=scratch, **settings(options.rows, answers, group, steps)),
            train_dataset=Dataset.from_list([{"prompt": str(k)} for k in range(answers)]),
            callbacks=[watch],
        )
        watch.trainer.train()
    trained = sum(sum(one[1:]) for groups in batches[options.warm :] for one in groups)
    seconds = watch.seconds[options.warm :]
    return Measurement(
        tokens_per_second=round(trained / sum(seconds), 1),
        seconds_of_each_step=tuple(round(second, 4) for second in seconds),
        settings={name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        versions={name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
    )


def settings(rows: int, answers: int, group: int, steps: int) -> dict[str, object]:
    """Arguments of `GRPOConfig`: one optimizer step for each batch of `answers`."""
    if answers % rows:
        raise SystemExit(f"--rows: {rows} does not divide the {answers} answers of a batch")
    return {
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": answers // rows,
        "num_generations": group,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


if __name__ == "__main__":
    print(json.dumps(asdict(measure(arguments()))))
