"""`stretto plan`: predict a recipe's time and memory on a machine before paying for it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from stretto.core.errors import Problem, RunFolderError, several
from stretto.launch.preflight.devices import reference_of
from stretto.launch.preflight.plan import Outline
from stretto.launch.preflight.questions import encode_demonstrations
from stretto.launch.recipe.recipe import load_recipe, to_toml
from stretto.model.hf.shape import shape_of_model
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.rollout.questions import Question
from stretto.store.files import write_atomically
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.commands.machine_choice import PlanChoice, machine_chosen
from stretto_app.extensions.preflight.paper import outline
from stretto_foresight.planner.costs import Costs, Job
from stretto_foresight.planner.layouts import own_layout
from stretto_foresight.planner.lengths import Lengths, LogNormalLengths, alone, lengths_of
from stretto_foresight.planner.machine import machine_of
from stretto_foresight.planner.predict import LayoutPrediction, RunPlan, plan
from stretto_report.dashboard.prediction import check_digest, run_digest, settings_digest

_LEGEND = (
    "eta: rollout.max_staleness, the most versions that a token may be behind; in flight: rollout.max_in_flight, "
    "groups; step s: seconds of a step; stale mean, p99: versions that trained tokens are behind"
)
_ANY = "h100"  # any machine: weights and activations need the same memory on all
_SHOWN = 4096  # most demonstrations whose lengths are used
_ASSUMED_MEAN, _ASSUMED_SIGMA = 1 / 3, 0.8  # assumed mean length without data, as a share of sampling.max_tokens


def plan_recipe(path: Path, overrides: Sequence[str], choice: PlanChoice, say: Callable[[str], None]) -> RunPlan:
    """Predict the best layouts of a recipe, best first, or its own layout if no number of GPUs is chosen. `say` gets
    assumptions and progress. If a run is chosen, the plan is written into its folder.

    Raises:
        UserError: the recipe or an option is wrong, or the model fits in no layout.
    """
    machine = machine_chosen(choice)
    asked = outline(load_recipe(path, overrides))
    own = settings_digest(tomllib.loads(to_toml(asked.recipe))) if choice.gpus is None else None
    if choice.run is not None:
        _check_run(choice.run, own)
    found = plan(job_from(asked, choice.lengths, say), machine, choice.gpus, choice.goal, say=say)
    whole = msgspec.structs.replace(found, recipe=own)
    if choice.run is not None:
        choice.run.mkdir(parents=True, exist_ok=True)
        written = RunFolder(choice.run).prediction
        write_atomically(written, as_json(whole).encode() + b"\n")
        say(f"the prediction is in {written}; `stretto inspect {choice.run}` shows it beside the run")
    return whole


def _check_run(run: Path, digest: str | None) -> None:
    """Check that a plan may be written into the run folder `run`: it is missing or has no ledger yet, or its run is of
    the planned recipe. `digest`: of that recipe; None: the plan is for a number of GPUs, which is refused.

    Raises:
        RunFolderError: the plan is for another recipe or for a number of GPUs, or `run` is no folder.
        StoreError: the run's ledger cannot be read.
    """
    if os.path.isfile(RunFolder(run).ledger):
        check_digest(Path(f"--run {run}"), digest, run_digest(run))
    elif digest is None:
        check_digest(Path(f"--run {run}"), None, "")
    elif os.path.exists(run) and not os.path.isdir(run):
        raise RunFolderError([Problem(f"--run {run}", "is no folder", "give the folder of a run, or of one to come")])


def job_of(path: Path, overrides: Sequence[str], lengths: str | None, say: Callable[[str], None]) -> Job:
    """Read and check a recipe file as the planner's input. A model folder that has only a config.json suffices.
    `lengths` and `say`: as in `job_from`. UserError for mistakes of the recipe."""
    return job_from(outline(load_recipe(path, overrides)), lengths, say)


def memory_per_device(asked: Outline) -> str:
    """Sentence about the estimated memory of a training and of a generating device, for `stretto train --dry-run`."""
    job = job_from(asked, f"constant:tokens={asked.sampling.max_tokens}", lambda text: None)
    layout = own_layout(job)
    costs = Costs(job, machine_of(_ANY), layout)
    memory, cache = costs.memory(), costs.token_bytes / 2**20
    return (
        f"{several(layout.ranks, 'rank')} of {costs.rank().total / 2**30:.1f} GiB; "
        f"{several(layout.engines, 'engine')} of {layout.tensor}, "
        f"{memory.engine:.1f} GiB of weights on each, and {cache:.3f} MiB for each token in the KV cache"
    )


def job_from(asked: Outline, lengths: str | None, say: Callable[[str], None]) -> Job:
    """Make the planner's input from a checked recipe.

    `lengths`: lengths of completions, as a distribution (``constant:tokens=300``), a file or a run folder; DataError if
    it is none of these. None: the lengths of the demonstrations, else an assumption; `say` gets a sentence about this
    choice.
    """
    recipe = asked.recipe
    return Job(
        shape=shape_of_model(asked.base),
        lengths=_lengths(asked, lengths, say),
        rollout=recipe.rollout,
        engine=recipe.engine,
        trainer=recipe.trainer,
        longest=asked.longest_sequence,
        recomputes=recipe.algorithm.loss.anchor == "recomputed",
        converses=recipe.workflow is not None,
        reference=reference_of(asked),
        refers=recipe.algorithm.reference.into if recipe.algorithm.reference is not None else "",
        critic=recipe.algorithm.critic is not None,
        reward_workers=recipe.rewards.workers,
    )


def _lengths(asked: Outline, words: str | None, say: Callable[[str], None]) -> Lengths:
    """Lengths of completions: `words`, what the user gives; None: those of the demonstrations, which the policy has
    learnt, else an assumption. `say` gets a sentence about a choice of the latter two."""
    most = asked.sampling.max_tokens
    prompt = round(fmean(len(one.token_ids) for one in asked.training))
    if words is not None:
        return lengths_of(words, prompt, most)
    if asked.demonstrations and (asked.base.path / "tokenizer.json").is_file():
        shown = [one for one in asked.demonstrations if isinstance(one, Question)][:_SHOWN]
        known = encode_demonstrations(shown, load_tokenizer(asked.base.path), asked.base.context_length)
        say(f"lengths of completions: those of {several(len(known), 'demonstration')}; --lengths gives others")
        return alone((len(one.completion_ids) for one in known), prompt, most)
    say(
        f"lengths of completions are not known: log-normal with a mean of {most * _ASSUMED_MEAN:.0f} tokens is "
        "assumed, a third of sampling.max_tokens; --lengths gives others"
    )
    return LogNormalLengths(max(1.0, most * _ASSUMED_MEAN), _ASSUMED_SIGMA, most, prompt)


def as_json(found: RunPlan) -> str:
    """The plan as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def rank_share(one: LayoutPrediction) -> float:
    """Share of a layout's devices that train."""
    return one.ranks / (one.ranks + one.engines * one.tensor)


def named(one: LayoutPrediction) -> str:
    """Short description of a layout: engines, the devices of each if it has several, ranks, and seconds of a step."""
    of = f" of {one.tensor}" if one.tensor > 1 else ""
    return f"{several(one.engines, 'engine')}{of}, {several(one.ranks, 'rank')}, {one.step_seconds:,.3g} s a step"


def table(found: RunPlan) -> str:
    """Table of the layouts, best first, and a sentence why the second is worse."""
    names = "engines  tensor  ranks  micro-batch  eta  in flight  step s  tokens/s  gen busy  train busy"
    heads = f"{names}  stale mean  p99  recomputed  GiB  hours  device-h".split("  ")
    rows = [
        [
            f"{one.engines}",
            f"{one.tensor}",
            f"{one.ranks}",
            f"{one.micro_batch_tokens:,}",
            "inf" if one.max_staleness is None else f"{one.max_staleness:g}",
            f"{one.max_in_flight:,}",
            f"{one.step_seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.busy['engine-0']:.0%}",
            f"{one.busy['trainer']:.0%}",
            f"{one.staleness.mean:.2f}",
            f"{one.staleness.p99}",
            f"{one.recomputed:.1%}",
            f"{one.memory_gib:.1f}",
            f"{one.hours:.3g}",
            f"{one.device_hours:.3g}",
        ]
        for one in found.layouts
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    said = f"machine {found.machine}; completions of {found.mean_length:,.0f} tokens in the mean"
    return "\n".join([said, *lines, _LEGEND, *_why(found)])


def _why(found: RunPlan) -> list[str]:
    """One sentence why the second best layout is worse; empty if there is no second."""
    if len(found.layouts) < 2:
        return []
    first, second = found.layouts[:2]
    if found.goal == "staleness" and second.staleness.mean > first.staleness.mean:
        versions = f"{second.staleness.mean:.2f} versions in the mean, against {first.staleness.mean:.2f}"
        return [f"the second is staler: {versions} of the first"]
    of_cost = found.goal == "cost"
    more = second.device_hours / first.device_hours if of_cost else second.hours / first.hours
    takes = f"takes {more - 1:.1%} more {'device-hours' if of_cost else 'time'}"
    if (first.engines, first.ranks, first.tensor) == (second.engines, second.ranks, second.tensor):
        one, other = ("inf" if each.max_staleness is None else f"{each.max_staleness:g}" for each in (first, second))
        return [f"the second {takes}: it is the first with eta {other} in place of {one}"]
    idle = "training" if second.waits_for == "generation" else "generation"
    share = second.busy["trainer"] if idle == "training" else second.busy["engine-0"]
    return [f"the second {takes}: a step waits for {second.waits_for}, and {idle} is busy for {share:.0%} of it"]
