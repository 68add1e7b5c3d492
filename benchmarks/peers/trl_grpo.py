"""How fast trl's `GRPOTrainer`, the synchronous peer, trains on this machine, in its own environment.

Runs under the interpreter that `environment.py trl` prints and imports nothing of stretto:

    PEER=$(python benchmarks/peers/environment.py trl)
    "$PEER" benchmarks/peers/trl_grpo.py MODEL PROMPTS.jsonl --groups 32 --group-size 8 --max-tokens 96 --steps 8

A *step* is one batch: ``groups * group_size`` answers are sampled, scored and trained on in `minibatches` sequential
optimizer updates. The clock starts after the first step, so that start-up and first-call costs do not count against
the peer. Prints one JSON object (see `Measurement`) as the last line of standard output.

Settings chosen in the peer's favour: no reference model (beta 0), no gradient checkpointing, no saving, no logging
while the clock runs, no data-loader workers, sdpa attention, and the whole minibatch in one forward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

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

PAGE = 32  # tokens of a page of the continuous generator's cache
PROMPT_ROOM = 64  # tokens of a prompt that the continuous generator's cache has room for
GENERATORS = ("padded", "continuous")
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class Measurement:
    """Result of one run.

    Example: ``{"trajectories_per_second": 150.6, "seconds_per_step": 1.7, "mean_tokens": 35.2, ...}``
    """

    trajectories_per_second: float  # trained answers, over all steps but the first
    seconds_per_step: float
    seconds_of_each_step: tuple[float, ...]
    mean_tokens: float  # answer length, end token included, over the measured steps
    mean_reward: float  # share of right answers, over the measured steps
    settings: dict[str, str | int | float | bool]
    versions: dict[str, str]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trl's GRPOTrainer as the synchronous peer")
    parser.add_argument("model", type=Path, help="Hugging Face model folder, tokenizer included")
    parser.add_argument("prompts", type=Path, help="JSONL, one object a line with `prompt` and `answer` (strings)")
    parser.add_argument("--groups", type=int, default=32, help="prompts per batch")
    parser.add_argument("--group-size", type=int, default=8, help="answers per prompt")
    parser.add_argument("--minibatches", type=int, default=1, help="sequential optimizer updates per batch")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens")
    parser.add_argument("--steps", type=int, default=8, help="batches that are measured, after a first one that is not")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--answer-marker", default="#", help="the final answer is what follows the last marker")
    parser.add_argument("--generator", choices=GENERATORS, default="padded", help="transformers' way of generating")
    parser.add_argument("--attention", choices=ATTENTIONS, default="sdpa", help="transformers' attention function")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast instead of float32")
    return parser.parse_args(words)


def is_right(completion: str, answer: str, marker: str) -> bool:
    """Whether the text after the last `marker` is the gold answer. Without a marker the answer is wrong.

    >>> is_right("3+8=11;11+5=16#16", "16", "#"), is_right("3+8=11", "11", "#")
    (True, False)
    """
    _, found, final = completion.rpartition(marker)
    return bool(found) and final.strip() == answer.strip()


def read_prompts(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [{"prompt": str(row["prompt"]), "answer": str(row["answer"])} for row in rows]


@dataclass
class Record:
    """What the trainer's two callbacks see of each step."""

    marker: str
    lengths: list[float] = field(default_factory=list)  # mean answer length of each batch, tokens
    rewards: list[float] = field(default_factory=list)  # share of right answers of each batch

    def score(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        """Reward function for trl: one number per answer."""
        right = [float(is_right(text, gold, self.marker)) for text, gold in zip(completions, answer, strict=True)]
        self.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        self.rewards.append(sum(right) / len(right))
        return right


class Watch(TrainerCallback):
    """Records the time (s) at which training on each batch ended."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches
        self.marks: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step % self.minibatches == 0:
            self.marks.append(time.perf_counter())


def measure(options: argparse.Namespace) -> Measurement:
    torch.set_num_threads(options.threads)
    disable_progress_bars()
    set_seed(options.seed)
    record, watch = Record(options.answer_marker), Watch(options.minibatches)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                options.model, dtype=torch.float32, attn_implementation=options.attention
            ),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            reward_funcs=record.score,
            args=GRPOConfig(output_dir=scratch, **trainer_settings(options)),
            train_dataset=Dataset.from_list(read_prompts(options.prompts)),
            callbacks=[watch],
        )
        trainer.train()
    return summary(options, watch.marks, record.lengths[1:], record.rewards[1:])


def trainer_settings(options: argparse.Namespace) -> dict[str, object]:
    """Arguments of `GRPOConfig`; an optimizer update uses 1 / minibatches of the answers of a batch."""
    answers = options.groups * options.group_size
    if answers % options.minibatches:
        raise SystemExit(f"--minibatches: {options.minibatches} does not divide the {answers} answers of a batch")
    return {
        "use_cpu": True,
        "bf16": options.bf16,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": (options.steps + 1) * options.minibatches,
        "per_device_train_batch_size": answers // options.minibatches,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": options.minibatches,
        "num_generations": options.group_size,
        "max_completion_length": options.max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "use_transformers_continuous_batching": options.generator == "continuous",
        "transformers_continuous_batching_config": paged_cache(options) if options.generator == "continuous" else None,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


def paged_cache(options: argparse.Namespace) -> dict[str, int]:
    """Size the cache for all answers of a batch at full length at once; by default it would take most of the memory."""
    answers = options.groups * options.group_size
    pages = -(-(PROMPT_ROOM + options.max_tokens) // PAGE)
    return {"page_size": PAGE, "num_blocks": answers * pages, "max_batch_tokens": max(512, answers)}


def summary(
    options: argparse.Namespace, marks: Sequence[float], lengths: Sequence[float], rewards: Sequence[float]
) -> Measurement:
    """Result over all steps but the first; `marks` are the times (s) at which the steps ended."""
    seconds = [later - earlier for earlier, later in pairwise(marks)]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return Measurement(
        trajectories_per_second=round(options.groups * options.group_size * len(seconds) / sum(seconds), 2),
        seconds_per_step=round(sum(seconds) / len(seconds), 4),
        seconds_of_each_step=tuple(round(second, 3) for second in seconds),
        mean_tokens=round(sum(lengths) / len(lengths), 2),
        mean_reward=round(sum(rewards) / len(rewards), 4),
        settings=settings,
        versions={name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(arguments()))))
