"""`stretto diff`: two runs are called equal in what was compared, and in nothing else."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection

import pytest

from stretto.store import lock
from stretto.store.ledger.schema import reading
from stretto_report.audit.diff import diff_runs
from stretto_report.reading.policies import weight_files
from tests.store.make import Make, ledger_at, trained

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of two steps that trained on the same."""
    for folder in (first := tmp_path / "a", second := tmp_path / "b"):
        folder.mkdir()
        with ledger_at(folder / "ledger.sqlite") as ledger:
            for step in (1, 2):
                trained(ledger, Make.batch(step, Make.group(f"0.{step}.0", Make.trajectory(f"0.{step}.0"))))
    return first, second


def keep(folder: Path, version: int, files: dict[str, bytes]) -> None:
    policy = folder / "policy" / f"v{version:06d}"
    policy.mkdir(parents=True)
    for name, data in files.items():
        (policy / name).write_bytes(data)


def test_runs_that_kept_no_policy_are_not_told_to_have_the_same(runs: tuple[Path, Path]) -> None:
    keep(runs[0], 1, {"model.safetensors": b"weights"})
    parting = diff_runs(*runs)
    assert (parting.step, parting.fields, parting.policies) == (2, (), ())
    assert str(parting).startswith("equal in all 2 steps: batches, ")
    assert str(parting).endswith("; no version's weights could be compared")


@pytest.mark.parametrize("runs_now", [True, False])
def test_a_run_that_takes_a_step_while_it_is_compared_is_compared_up_to_there_or_again(
    runs: tuple[Path, Path], runs_now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger at rest is read without locks, so a run that begins meanwhile may have been read in part."""
    ledgers = [folder / "ledger.sqlite" for folder in runs]

    @contextmanager
    def reading_before_a_step(ledger: Path) -> Iterator[Connection]:
        with reading(ledger) as connection:
            yield connection
        if ledger in ledgers:
            with ledger_at(ledgers.pop(ledgers.index(ledger))) as writer:
                trained(writer, Make.batch(3, Make.group("0.3.0", Make.trajectory("0.3.0"))))

    held = [lock.acquire(folder) for folder in runs if runs_now]
    monkeypatch.setattr("stretto_report.audit.diff.reading", reading_before_a_step)
    parting = diff_runs(*runs)
    assert (parting.step, parting.fields) == (2 if runs_now else 3, ())
    for one in held:
        os.close(one)


def test_the_versions_whose_weights_were_compared_are_named(runs: tuple[Path, Path]) -> None:
    for folder in runs:
        for version in (0, 2):
            keep(folder, version, dict.fromkeys(SHARDS, b"weights"))
    assert str(diff_runs(*runs)).endswith(", and the weights of versions 0, 2")


def test_weights_in_several_files_are_compared_in_all_of_them(runs: tuple[Path, Path]) -> None:
    for folder in runs:
        keep(folder, 1, {SHARDS[0]: b"weights", SHARDS[1]: folder.name.encode()})
    parting = diff_runs(*runs)
    assert (parting.step, parting.fields) == (1, ("weights of version 1",))


def test_a_version_that_a_run_removes_while_it_is_compared_is_not_compared(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in runs:
        for version in (1, 2):
            keep(folder, version, {"model.safetensors": b"weights"})

    def files_before_they_go(policy: Path) -> list[Path]:
        found = weight_files(policy)
        if policy == runs[1] / "policy" / "v000001":
            shutil.rmtree(policy)
        return found

    monkeypatch.setattr("stretto_report.reading.policies.weight_files", files_before_they_go)
    assert diff_runs(*runs).policies == (2,)
