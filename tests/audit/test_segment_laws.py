"""The laws of segments: a forest that is whole keeps them, and each breach of one is named.

Segments are written by the ledger itself, so that every checksum fits.
"""

import json
from pathlib import Path

import msgspec
import pytest

from stretto.core.columns import pack, stamps_of
from stretto.core.records import (
    NOTHING,
    PROMPT,
    Batch,
    Group,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
)
from stretto_report.audit.check import check_run
from stretto_report.audit.diff import diff_runs
from tests.audit.runs import RECIPE_OF_ONE
from tests.store.make import RIGHT, buffered, ledger_at
from tests.store.make import trained as train

ASKED = Prompt(id="a", token_ids=(3, 4), text="", answer="")
PLACE, ONCE = "every segment has its place", "every sampled token is trained once"
VERSIONS = "versions grow by one"


def sampled(*versions: int, parent: int | None = None, tokens: int | None = None) -> Segment:
    count = len(versions) if tokens is None else tokens
    columns, stamps = pack((7,) * count, (-0.5,) * count), stamps_of(versions)
    return msgspec.structs.replace(Segment.sealed(columns, count, stamps, stop_reason=StopReason.STOP), parent=parent)


def given(*tokens: int, parent: int | None = None, cause: str = "") -> Segment:
    return Segment.of(tokens, parent=parent, cause=cause)


FOREST = (
    sampled(0, 0), given(9), sampled(0), given(8, parent=0, cause="history_rewritten"), sampled(0, 0),
    given(5, parent=NOTHING, cause="subagent"), sampled(0),
)  # fmt: skip


def run_of(folder: Path, *segments: Segment, trained: bool = True, verdict: Verdict = RIGHT) -> Path:
    """A run of one step, on one trajectory of these segments."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE_OF_ONE)
    group = Group("0.a.0", ASKED, 0, (Trajectory("0.a.0/0", segments, verdict, ""),))
    with ledger_at(folder / "ledger.sqlite") as ledger:
        if trained:
            train(ledger, Batch(step=1, version=0, groups=(group,)), sum(len(one.versions) for one in segments))
        else:
            buffered(ledger, group)
    return folder


def test_a_forest_that_is_whole_keeps_every_law(tmp_path: Path) -> None:
    findings = check_run(run_of(tmp_path / "run", *FOREST))
    assert findings.kept, findings


BREACHES = {
    "behind a later segment": ((sampled(0), given(9, parent=2), sampled(0, parent=0)), "segment 1 is behind segment 2"),
    "behind itself": ((sampled(0), given(9, parent=1)), "segment 1 is behind segment 1"),
    "behind what there is not": ((sampled(0), given(9, parent=-3)), "segment 1 is behind segment -3"),
    "sampled behind nothing": ((sampled(0, parent=NOTHING),), "segment 0 was sampled behind nothing"),
    "without a version": ((sampled(0, tokens=2),), "segment 0 has 2 tokens, 2 log-probabilities and 1 versions"),
    "a given token with a log-probability": (
        (sampled(0), Segment.sealed(pack((9,), (-0.5,)), 1, ())),
        "segment 1 has 1 tokens, 1 log-probabilities and 0 versions",
    ),
}


@pytest.mark.parametrize(("segments", "breach"), BREACHES.values(), ids=BREACHES)
def test_a_segment_without_its_place_is_named(tmp_path: Path, segments: tuple[Segment, ...], breach: str) -> None:
    assert check_run(run_of(tmp_path, *segments)).breaches[PLACE] == (f"0.a.0/0: {breach}",)


@pytest.mark.parametrize(
    ("segments", "backward"),
    [
        ((sampled(0, 2, 1),), (0, 2, 1)),
        ((sampled(0, 2), given(9), sampled(1, 3)), (2, 1, 3)),
        ((sampled(0, 1), given(9), given(9), sampled(1), sampled(0, parent=0)), (1, 0)),
        ((sampled(0, 3), sampled(0, 2, parent=PROMPT), sampled(2, parent=1)), None),
    ],
    ids=["in a segment", "behind an older turn", "in a branch", "parallel turns"],
)
def test_versions_that_go_back_are_named(
    tmp_path: Path, segments: tuple[Segment, ...], backward: tuple[int, ...] | None
) -> None:
    """Of parallel turns the second was begun before the first ended: it is behind the prompt, not behind the first."""
    breaches = check_run(run_of(tmp_path, *segments, trained=False)).breaches[VERSIONS]
    told = [f"0.a.0/0: its versions go back: {backward}"] if backward else []
    assert [one for one in breaches if "go back" in one] == told


@pytest.mark.parametrize(("told", "masked"), [(7, 0), (5, 1), (5, 0)], ids=["twice", "masked", "left out"])
def test_a_token_that_was_not_trained_once_is_found(tmp_path: Path, told: int, masked: int) -> None:
    folder = run_of(tmp_path, *FOREST)
    line = {"kind": "step", "step": 1, "trained_tokens": 6, "masked_tokens": 0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + '\n{"kind": "evaluation", "step": 1}\n{"kind": "st')
    assert check_run(folder).kept
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"trained_tokens": told, "masked_tokens": masked}) + "\n")
    assert check_run(folder).breaches[ONCE] == (
        f"step 1 trained on {told} tokens and masked {masked}, its batch has 6 and 0",
    )


BUDGETS = {
    "trained": (
        {"trained": 5, "generated_and_waiting": 3},
        "the budget has 5 tokens trained and 0 masked, the batches so far have 6 and 0",
    ),
    "masked": (
        {"masked": 1, "generated_and_waiting": 1},
        "the budget has 6 tokens trained and 1 masked, the batches so far have 6 and 0",
    ),
    "fewer than nothing": ({"failed": -1, "expired": 2}, "the budget has -1 tokens failed"),
    "missing": ({"generated_and_waiting": 1}, "the budget has 8 sampled tokens, engines had counted 9"),
}


@pytest.mark.parametrize(("change", "breach"), BUDGETS.values(), ids=BUDGETS)
def test_a_budget_that_does_not_add_up_is_found(tmp_path: Path, change: dict[str, int], breach: str) -> None:
    """Of nine sampled tokens six were trained; two were recomputed."""
    folder = run_of(tmp_path, *FOREST)
    whole = {"trained": 6, "masked": 0, "generated_and_waiting": 2, "failed": 1, "expired": 0, "recomputed": 2}

    def tell(tokens: dict[str, int]) -> None:
        budget = {name: {"seconds": 0.0, "tokens": count} for name, count in tokens.items()}
        line = {"kind": "step", "step": 1, "trained_tokens": 6, "masked_tokens": 0, "generated_tokens": 9}
        (folder / "metrics.jsonl").write_text(json.dumps(line | {"goodput": budget}) + "\n")

    tell(whole)
    assert check_run(folder).kept
    tell(whole | change)
    assert check_run(folder).breaches["every token has one category"] == (f"step 1: {breach}",)


CHANGES = {
    "where a branch begins": (given(8, parent=2, cause="history_rewritten"), "parent of segment 3 of 0.a.0/0"),
    "why it does": (given(8, parent=0, cause="compaction"), "cause of segment 3 of 0.a.0/0"),
    "what was given": (given(6, parent=0, cause="history_rewritten"), "token_ids of segment 3 of 0.a.0/0"),
    "a reward": (Segment.of((8,), parent=0, cause="history_rewritten", reward=0.5), "reward of segment 3 of 0.a.0/0"),
}


@pytest.mark.parametrize(("other", "field"), CHANGES.values(), ids=CHANGES)
def test_two_runs_are_compared_segment_by_segment(tmp_path: Path, other: Segment, field: str) -> None:
    first = run_of(tmp_path / "first", *FOREST)
    second = run_of(tmp_path / "second", *FOREST[:3], other, *FOREST[4:])
    assert diff_runs(first, first).fields == ()
    assert diff_runs(first, second).fields == (field,)


def test_runs_with_other_numbers_of_turns_or_other_parts_of_a_reward_differ(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", *FOREST)
    assert diff_runs(first, run_of(tmp_path / "second", *FOREST[:5])).fields == ("segments of 0.a.0/0 (7 and 5)",)
    named = Verdict(outcome=Outcome.RIGHT, reward=1.0, rewards={"format": 1.0})
    assert diff_runs(first, run_of(tmp_path / "third", *FOREST, verdict=named)).fields == ("reward of 0.a.0/0",)
