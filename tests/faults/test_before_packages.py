"""A run that stretto recorded before it was cut into packages says today what it said then, byte for byte.

`tests/data/before_packages` was recorded, and its outputs printed, by the commit before the first move (format 5 of the
ledger): conversations of two turns, two engines, a filter, a kill after step 4 and a resume from step 2. Newer versions
of stretto may add keys to a JSON object and lines to a table. Everything else is compared as it was printed.
"""

import json
import shutil
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto_report.audit.check import check_run
from tests.faults.test_recorded_run import ROUNDING, weights
from tests.launch.running import Laboratory

OLD = Path(__file__).parents[1] / "data" / "before_packages"
STEPS = 6


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `run` and `printed`: the run, and what is too long to be committed as it is."""
    with tarfile.open(OLD / "run.tar.xz") as archive:
        archive.extractall(folder := tmp_path_factory.mktemp("before"), filter="data")
    return folder


@pytest.fixture
def run(unpacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unpacked / "run", tmp_path / "run"))


def restricted(now: object, then: object) -> object:
    """Drop the keys of `now` that `then` lacks, at any depth."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {key: restricted(value, then[key]) for key, value in now.items() if key in then}
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [restricted(*pair) for pair in zip(now, then, strict=True)]
    return now


def assert_only_keys_were_added(now: str, then: str) -> None:
    """Numbers are compared as they are written, keys in their order. What `canary` said of a proof beside its five
    fields is in `canary_proofs`."""
    old, new = (json.loads(text, parse_float=str, parse_int=str) for text in (then, now))
    new |= {"canary": new["canary_proofs"]} if "canary_proofs" in new else {}
    assert json.dumps(restricted(new, old)) == json.dumps(old)


@pytest.mark.parametrize(
    ("now", "then", "same"),
    [
        ('{"a": 1, "new": 2, "b": [{"c": 0.50, "d": null}]}', '{"a": 1, "b": [{"c": 0.50}]}', True),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', False),
        ('{"a": 0.5}', '{"a": 0.50}', False),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": [1, 2]}', '{"a": [1]}', False),
    ],
)
def test_a_key_may_be_added_and_nothing_else(now: str, then: str, same: bool) -> None:
    if same:
        assert_only_keys_were_added(now, then)
    else:
        with pytest.raises(AssertionError):
            assert_only_keys_were_added(now, then)


def test_it_is_inspected_checked_and_exported_as_before(run: Path, unpacked: Path, laboratory: Laboratory) -> None:
    assert_only_keys_were_added(laboratory.run("inspect", run, "--json").out, (OLD / "inspect.json").read_text())
    added = [line for line in laboratory.run("inspect", run).out.splitlines() if line.split()[:1] == ["state"]]
    assert [line.split() for line in added] == [["state", "finished"]]
    for command, options, file in (
        ("inspect", [], "inspect"),
        ("inspect", ["--ledger"], "ledger"),
        ("check", [], "check"),
    ):
        printed = laboratory.run(command, run, *options).well()
        now = [line.rstrip() for line in printed.splitlines() if line.strip() and line not in added]
        then = [line.rstrip() for line in (OLD / f"{file}.txt").read_text().splitlines() if line.strip()]
        assert now[-len(then) :] == then  # above them is a title, the folder's path
        assert "".join(line.strip() for line in now[: -len(then)]) in (str(run), "")
    for file, option in (("export.jsonl", []), ("trace.json", ["--trace"])):
        assert laboratory.run("export", run, run.parent / file, *option).code == 0
        assert (run.parent / file).read_bytes() == (unpacked / "printed" / file).read_bytes()


def assert_replayed(run: Path, steps: int) -> None:
    """The weights after `steps` steps of the first replay are the run's, up to `ROUNDING`: the first steps were
    computed by another processor."""
    start, end = (weights(run / "policy" / f"v{version:06d}") for version in (0, steps))
    again = weights(run / "branches" / "001" / "policy" / f"v{steps:06d}")
    assert (again - end).norm() <= ROUNDING * (end - start).norm()


def test_it_is_replayed_to_its_weights(run: Path, laboratory: Laboratory) -> None:
    ended = laboratory.run("replay", run)
    assert_replayed(run, STEPS)
    said = [line for line in ended.out.splitlines() if str(run) not in line][:STEPS]
    then = (OLD / "replay.txt").read_text().splitlines()[:STEPS]
    assert [line.rpartition(" ")[0] for line in said] == [line.rpartition(" ")[0] for line in then]
    losses, before = ([float(line.rpartition(" ")[2]) for line in lines] for lines in (said, then))
    assert losses == pytest.approx(before, abs=ROUNDING * max(map(abs, before)))


#: As it was recorded, as versions with Prompt.opens recorded it, and of other questions.
DIGESTS = {"05f925934d187c564812": 0, "209afb4edf956a6f109d": 0, "05f925934d187c564813": 2}


def test_a_resume_recognises_its_questions(run: Path, laboratory: Laboratory) -> None:
    for digest, code in DIGESTS.items():
        with closing(Ledger(run / "ledger.sqlite", StoreConfig())) as ledger:
            ledger.put("questions", digest)
        ended = laboratory.run("train", run, "--resume", f"trainer.steps={STEPS + 2}", "--dry-run")
        assert ended.code == code, ended.out + ended.err
        assert ("questions are not those of the run" in ended.err) == bool(code)


@pytest.mark.long
def test_it_is_gone_on_with(run: Path, laboratory: Laboratory) -> None:
    laboratory.run("train", run, "--resume", f"trainer.steps={STEPS + 2}").well()
    assert check_run(run).kept
    laboratory.run("replay", run)
    assert_replayed(run, STEPS + 2)
