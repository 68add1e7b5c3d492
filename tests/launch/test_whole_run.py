"""A run from end to end, through the command line, in real processes.

- The run folder explains itself, and its balance is true.
- Each token was sampled by the weights it is labelled with: re-scored by plain transformers, across interruptions.
- Policies load by transformers' Auto classes; plots are pictures; the tool that the recipe names has every step.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stretto.core.records import State
from stretto.launch.recipe.recipe import load_recipe
from stretto.store.series.metrics import read_metrics
from stretto.store.series.progress import LONGEST
from stretto.store.series.tokens import TokenOutcome, read_tokens
from stretto.store.totals import CATEGORIES
from tests.launch.running import TINY, Laboratory, assert_the_law, exported, trained_ages
from tests.store.test_inspection import FIELDS
from tests.tolerances import EXACT

INSPECTION: dict[str, type | tuple[type, ...] | list[str]] = {
    "steps": int,
    "version": int,
    "wall_seconds": float,
    "rl_seconds": float,
    "initial_accuracy": float,
    "final_accuracy": float,
    "tokens": ["generated", "trained", "recomputed", "wasted"],
    "trajectories": [
        *("issued", "trained", "buffered", "in_flight", "filtered", "expired", "failed"),
        *("undecided", "undecided_reason"),
    ],
    "staleness": ["bound", "max", "mean", "histogram"],
    "interrupted": int,
    "multi_version": int,
    "busy": ["conductor", "engine-0", "rewards", "trainer"],
    "engines": list,
    "weights": ["medium", "bytes", "seconds_pull_median", "seconds_pause_median", "copies", "seconds_publish_median"],
    "rewards": dict,
    "gateway": type(None),  # a run whose agents need one has it while it runs
    "goodput": list(CATEGORIES),
    "goodput_roles": ["conductor", "engine-0", "rewards", "trainer"],
    "idle": ["conductor", "engine-0", "rewards", "trainer"],
    "selection_bias": ["length", "difficulty", "latency"],
    "masked_groups": (dict, type(None)),
    "bounds": list,
    "canary": list,
    "canary_proofs": list,
    "state": str,
    "reason": str,
    "replay": type(None),
    "cores": dict,
    "changed": list,
    "predicted": type(None),  # nothing was predicted of this run
    "not_predicted": str,
    "alarms": list,
    "alarms_checked": int,
    "alarms_not_measured": list,
}
STEPS = 6
SHOWN = "logging.to=tensorboard"


@pytest.fixture(scope="module")
def run_dir(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with laboratory.train(folder, SHOWN, draws=True) as command:
        command.end().well()
        command.assert_nothing_is_left()
    return folder


@pytest.fixture(scope="module")
def trajectories(laboratory: Laboratory, run_dir: Path) -> list[dict[str, Any]]:
    return exported(laboratory, run_dir)


def test_the_run_folder_holds_everything_that_explains_the_run(run_dir: Path) -> None:
    files = {"recipe.toml", "versions.json", "machine.json", "kernels.json", "log.txt"}
    files |= {"metrics.jsonl", "spans.jsonl", "ledger.sqlite"}
    assert files <= {path.name for path in run_dir.iterdir()}
    assert [path.name for path in sorted((run_dir / "logs").iterdir())] == [
        "engine-0.txt",
        "rewards.txt",
        "tensorboard.txt",
        "trainer.txt",
    ]
    assert [path.name for path in sorted((run_dir / "policy").iterdir())] == [f"v{k:06d}" for k in range(STEPS + 1)]
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert "torch" in json.loads((run_dir / "versions.json").read_text())
    assert json.loads((run_dir / "machine.json").read_text())["cores"] >= 1


def test_no_line_of_the_log_is_longer_than_120_characters_but_warnings_and_paths(run_dir: Path) -> None:
    lines = [line.partition("  ")[2] for line in (run_dir / "log.txt").read_text().splitlines()]
    assert any(line.startswith(f"step {STEPS}/{STEPS} ") for line in lines)
    assert [line for line in lines if len(line) > LONGEST and not line.startswith(("warning: ", "shown in "))] == []


def test_what_became_of_each_token_is_on_record_and_adds_up_to_what_each_step_measured(
    run_dir: Path, trajectories: list[dict[str, Any]]
) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "trained_tokens" in line}
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, line in steps.items():
        trained = {t["id"]: t for t in trajectories if t["trained_step"] == step}
        found = read_tokens(run_dir / "tokens", step, list(trained))
        assert {id: len(t["token_ids"]) for id, t in trained.items()} == {id: len(r.outcome) for id, r in found.items()}
        outcomes = np.concatenate([record.outcome for record in found.values()])
        in_loss, bounded, corrected, _ = (np.count_nonzero(outcomes & flag) for flag in TokenOutcome)
        assert (in_loss, len(outcomes) - in_loss) == (line["trained_tokens"], line["masked_tokens"])
        assert bounded == round(line["trainer"]["clip_fraction"] * in_loss)
        assert corrected == round(line["trainer"]["capped_fraction"] * in_loss)


def test_the_resolved_recipe_is_the_one_that_was_run(run_dir: Path) -> None:
    assert load_recipe(run_dir / "recipe.toml") == load_recipe(TINY, [SHOWN])


def test_plots_are_pictures(run_dir: Path) -> None:
    plots = sorted((run_dir / "plots").iterdir())
    names = ["accuracy.png", "response_length.png", "reward.png", "staleness.png", "timeline.png"]
    assert [plot.name for plot in plots] == names
    assert all(plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for plot in plots)


def test_the_tool_has_every_step_and_both_evaluations_as_they_are_on_record(run_dir: Path) -> None:
    steps, evaluations = read_metrics(run_dir / "metrics.jsonl")
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    for name, expected in (
        ("reward", [(line.step, line.reward) for line in steps]),
        ("trainer/loss", [(line.step, line.trainer["loss"]) for line in steps]),
        ("evaluation/accuracy", [(line.step, line.accuracy) for line in evaluations]),
    ):
        assert [(point.step, point.value) for point in shown.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in expected
        ]
    assert [line.step for line in evaluations] == [0, STEPS]


def test_inspect_prints_one_object_with_every_field(laboratory: Laboratory, run_dir: Path) -> None:
    found = json.loads(laboratory.run("inspect", run_dir, "--json").out)
    assert list(found) == list(INSPECTION)
    for name, kind in INSPECTION.items():
        if isinstance(kind, list):
            assert list(found[name]) == kind
        else:
            assert isinstance(found[name], kind)
    assert found["steps"] == found["version"] == STEPS
    assert 0 < found["rl_seconds"] < found["wall_seconds"]
    assert all(0 <= fraction <= 1 for role, fraction in found["busy"].items() if role != "rewards"), found["busy"]
    assert found["busy"]["trainer"] > 0
    assert found["busy"]["engine-0"] > 0
    assert sum(found["cores"].values()) > found["cores"]["starting"] > 0


def test_inspect_shows_a_table_to_people(laboratory: Laboratory, run_dir: Path) -> None:
    table = laboratory.run("inspect", run_dir).out
    assert "held-out accuracy" in table
    assert "engine-0 busy" in table


def test_the_balance_is_true(run_dir: Path, trajectories: list[dict[str, Any]]) -> None:
    found = assert_the_law(run_dir)
    for state in State:
        counted = sum(trajectory["state"] == state for trajectory in trajectories)
        assert getattr(found.trajectories, state.value) == counted
    assert (found.trajectories.issued, found.trajectories.trained) == (len(trajectories), STEPS * 2 * 4)


def test_tokens_are_counted_as_they_are_on_record(run_dir: Path, trajectories: list[dict[str, Any]]) -> None:
    found = assert_the_law(run_dir)
    on_record = sum(len(trajectory["token_ids"]) for trajectory in trajectories)
    ages = trained_ages(trajectories)
    within = [age for age in ages if age <= 1]  # the rest is masked: kept as context, left out of the loss
    assert (found.staleness.bound, found.tokens.trained) == (1, len(within))
    assert found.staleness.histogram == {age: within.count(age) for age in sorted(set(within))}
    assert found.staleness.mean == pytest.approx(sum(within) / len(within))
    buffered = sum(len(trajectory["token_ids"]) for trajectory in trajectories if trajectory["state"] == "buffered")
    assert found.tokens.generated >= on_record
    # Answers that were in flight when the last step was done, if there were any, are what is wasted.
    assert found.tokens.trained + found.tokens.wasted + buffered == found.tokens.generated
    assert found.tokens.recomputed > 0 or found.interrupted == 0


def test_every_token_and_every_second_has_its_category(run_dir: Path) -> None:
    found = assert_the_law(run_dir)
    tokens = {name: category.tokens for name, category in found.goodput.items()}
    assert sum(tokens.values()) == found.tokens.generated + found.tokens.recomputed
    assert (tokens["trained"], tokens["recomputed"]) == (found.tokens.trained, found.tokens.recomputed)
    assert tokens["generated_and_waiting"] > 0  # when the last step was done, answers were in flight
    assert tokens["expired"] == tokens["failed"] == 0
    for role, seconds in found.goodput_roles.items():
        assert sum(seconds.values()) == pytest.approx(found.wall_seconds, rel=0.01), role
        assert seconds["idle"] == pytest.approx(sum(found.idle[role].values())), role
    assert found.goodput_roles["trainer"]["trained"] > 0
    assert {"starting", "publishing"} <= found.idle["trainer"].keys()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line["goodput"]["trained"]["tokens"] for line in steps if line["kind"] == "step"]
    assert trained == sorted(trained)
    assert trained[-1] == found.tokens.trained


def test_interruptions_happened_and_are_counted(laboratory: Laboratory, tmp_path: Path) -> None:
    """With few slots a batch takes longer to be sampled than to be trained on, so updates meet completions, also on a
    busy machine."""
    laboratory.trained(tmp_path / "run", "trainer.steps=20", "engine.slots=1")
    found = assert_the_law(tmp_path / "run")
    several = sum(len(set(trajectory["versions"])) > 1 for trajectory in exported(laboratory, tmp_path / "run"))
    assert found.multi_version == several > 0
    assert found.interrupted >= several


def test_every_engine_and_the_way_of_the_weights_are_told(run_dir: Path) -> None:
    found = assert_the_law(run_dir)
    (engine,) = found.engines
    assert (engine.name, engine.kind, engine.host) == ("engine-0", "native", platform.node())
    assert (engine.joined_step, engine.left_step, engine.reason) == (0, None, "")
    assert (engine.version, engine.generated) == (found.version, found.tokens.generated)
    weights = found.weights
    assert weights.medium == "shared_memory"
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "policy" / "v000000")
    assert weights.bytes == 4 * sum(parameter.numel() for parameter in policy.parameters())
    assert weights.seconds_pull_median is not None
    assert weights.seconds_pause_median is not None
    assert 0 < weights.seconds_pull_median < 60
    assert weights.seconds_pause_median > 0
    assert weights.copies == 2.0, "to be written, and written"
    assert weights.seconds_publish_median is not None
    assert 0 < weights.seconds_publish_median < 60


def test_export_has_exactly_the_promised_fields(trajectories: list[dict[str, Any]]) -> None:
    assert all(list(trajectory) == FIELDS for trajectory in trajectories)
    ids = [trajectory["id"] for trajectory in trajectories]
    assert len(set(ids)) == len(ids)
    for trajectory in trajectories:
        assert len({len(trajectory[name]) for name in ("token_ids", "behavior_logprobs", "versions")}) == 1
        assert trajectory["versions"] == sorted(trajectory["versions"])
        assert trajectory["engines"] == (["engine-0"] if trajectory["token_ids"] else [])
        assert (trajectory["state"] == "trained") == (trajectory["trained_step"] is not None)
        if trajectory["state"] == "trained":
            assert trajectory["stop_reason"] in ("stop", "length")
            assert trajectory["reward"] == len(trajectory["text"]) % 5 / 4


def rescored(model: PreTrainedModel, trajectory: dict[str, Any]) -> list[float]:
    """Log-probabilities of the answer's tokens under one policy, by transformers' own attention."""
    prompt, answer = trajectory["prompt_token_ids"], trajectory["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
    return [float(logprob) for logprob in chosen[:, 0]]


def policies(run_dir: Path) -> list[PreTrainedModel]:
    folders = sorted((run_dir / "policy").iterdir())
    return [AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval() for path in folders]


def worst(models: Sequence[PreTrainedModel], trajectories: Sequence[dict[str, Any]], shift: int = 0) -> float:
    """The largest distance between a logged log-probability and that of the version `shift` after its own."""
    torch.set_num_threads(1)
    errors = [0.0]
    for trajectory in trajectories:
        by_version = {
            version: rescored(models[min(version + shift, len(models) - 1)], trajectory)
            for version in set(trajectory["versions"])
        }
        errors += [
            abs(by_version[version][t] - trajectory["behavior_logprobs"][t])
            for t, version in enumerate(trajectory["versions"])
        ]
    return max(errors)


def test_every_token_was_sampled_by_the_version_on_its_label(run_dir: Path, trajectories: list[dict[str, Any]]) -> None:
    models = policies(run_dir)
    assert worst(models, trajectories) < EXACT
    assert worst(models, trajectories, shift=1) > 1e-2, "the versions are too alike for this test to mean anything"


@pytest.mark.long
def test_so_it_is_with_two_engines_and_a_bound_that_is_waited_for(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, "engine.count=2", "rollout.beyond_bound=wait", "trainer.steps=8")
    found, trajectories = assert_the_law(run_dir), exported(laboratory, run_dir)
    assert found.busy["engine-1"] > 0
    assert [engine.name for engine in found.engines] == ["engine-0", "engine-1"]
    assert sum(engine.generated for engine in found.engines) == found.tokens.generated
    assert {name for t in trajectories for name in t["engines"]} == {"engine-0", "engine-1"}
    assert found.multi_version > 0
    assert worst(policies(run_dir), trajectories) < EXACT
    trained = [t for t in trajectories if t["state"] == "trained"]
    assert max(t["trained_step"] - 1 - t["versions"][0] for t in trained) <= found.staleness.bound == 1
    assert found.trajectories.expired == 0


def test_the_tokenizer_travels_with_the_policy(run_dir: Path, trajectories: list[dict[str, Any]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy" / "v000006")
    for trajectory in trajectories[:20]:
        assert tokenizer.decode(trajectory["token_ids"], skip_special_tokens=True) == trajectory["text"]
