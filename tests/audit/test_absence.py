"""Promises: what is deleted from a finished run, is there twice, or is cut, is a breach or a note of `stretto check`;
the committed runs, which are whole, get neither.
"""

import shutil
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from stretto.core.errors import StrettoError
from stretto_report.audit.check import check_run
from tests.store.make import sql

DATA = Path(__file__).parents[1] / "data"
TABLES = ("groups", "trajectories", "payloads", "partials", "calls", "steps", "meta", "events")
FACTS = (
    "canary", "conductor", "data", "engines", "held out", "in_flight", "judged", "model", "questions", "recipe", "seed",
    "selection", "standing", "start", "totals",
)  # fmt: skip
FILES = ("log.txt", "machine.json", "metrics.jsonl", "questions.jsonl", "recipe.toml", "spans.jsonl", "versions.json")
LINES = ("held_out.jsonl", "metrics.jsonl", "questions.jsonl", "samples.jsonl", "spans.jsonl")
START = ("config.json", "model.safetensors", "tokenizer.json")

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tarfile.open(DATA / "before_packages" / "run.tar.xz") as archive:
        archive.extractall(folder := tmp_path_factory.mktemp("before"), filter="data")
    return folder / "run"


def of_ledger(statement: str, *values: object) -> Damage:
    return lambda run: sql(run / "ledger.sqlite", statement, *values)


def doubled(table: str) -> Damage:
    """Each row a second time: with keys of its own where the table has keys."""

    def damage(run: Path) -> None:
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            keys = {"key": "key + 1000", "step": "step + 1000", "id": "id || 'x'", "name": "name || 'x'"}
            moved = keys if table != "events" else {}
            values = ", ".join(moved.get(column, column) for column in columns)
            connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table}")
            connection.commit()

    return damage


def of_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def gone(name: str) -> Damage:
    return lambda run: (run / name).unlink()


def damages() -> Iterator[tuple[str, Damage]]:
    for table in TABLES:
        # What was sampled of a trajectory in flight, and events that no bound has caused, are promised by nothing.
        if table not in ("partials", "calls", "events"):
            yield f"{table} deleted", of_ledger(f"DELETE FROM {table}")
        if table not in ("events", "meta"):
            order = "key" if table != "steps" else "step"
            yield (
                f"{table} without its first row",
                of_ledger(
                    f"DELETE FROM {table} WHERE {order} = (SELECT min({order}) FROM {table})"
                    + (" AND begin = 0" if table == "partials" else "")
                    + (" AND number = 0" if table == "calls" else "")
                ),
            )
        yield f"{table} twice", doubled(table)
    for fact in FACTS:
        yield f"fact {fact} deleted", of_ledger("DELETE FROM meta WHERE name = ?", fact)
        cut = "UPDATE meta SET value = substr(value, 1, length(value) / 2) WHERE name = ?"
        yield f"fact {fact} cut", of_ledger(cut, fact)
    for name in (*FILES, *(f"policy/v000000/{file}" for file in START)):
        yield f"{name} deleted", gone(name)
    for name in LINES:
        yield f"{name} cut", of_file(name, lambda data: data[:-5])
        yield f"{name} with a line of another kind", of_file(name, lambda data: data + b'"\xe2\x80\xa8"\n')
    for name in ("held_out.jsonl", "metrics.jsonl", "questions.jsonl", "spans.jsonl"):
        yield f"{name} twice", of_file(name, lambda data: data + data)
    for name in ("held_out.jsonl", "metrics.jsonl", "questions.jsonl"):
        for place in (0, 2, -2):
            yield f"{name} without line {place}", of_file(name, partial(_without, place=place))


def _without(data: bytes, place: int) -> bytes:
    lines = data.split(b"\n")
    return b"\n".join(line for at, line in enumerate(lines) if at != place % len(lines))


@pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in damages()])
def test_what_is_absent_cut_or_there_twice_is_named(whole: Path, tmp_path: Path, damage: Damage) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    damage(run)
    try:
        found = check_run(run)
    except StrettoError:
        return  # it cannot be read at all, and says so
    assert not found.kept or found.notes


def test_a_run_that_is_whole_has_no_notes(whole: Path) -> None:
    found = check_run(whole)
    assert (found.kept, found.notes) == (True, ())


def test_a_run_of_format_2_has_the_note_of_its_format_alone() -> None:
    assert check_run(DATA / "synchronous_run").notes == (
        "the ledger has format 2: it has no seals of its recipe and of its first policy",
    )


def test_changes_of_bounds_that_are_gone_are_told_by_the_events(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    sql(run / "ledger.sqlite", "INSERT INTO events VALUES (1.0, 'bound', 'max_staleness 1 -> 2 after step 1: fast')")
    assert check_run(run).breaches["the file is whole"] == (
        "1 changes of bounds are among the events, on record are 0",
    )


def test_a_line_with_a_separator_of_another_kind_in_a_text_is_one_line(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    metrics = run / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8").replace(
        '"trained_tokens":', '"undecided_reason":"a\u2028b","trained_tokens":1'
    )
    metrics.write_text(text, encoding="utf-8")
    assert len(check_run(run).breaches["every sampled token is trained once"]) == 6


def test_a_line_that_was_cut_off_within_a_character_is_no_line(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write('{"kind":"step","step":7,"undecided_reason":"größer"'.encode()[:-6])
    found = check_run(run)
    assert (found.kept, found.notes) == (True, ("metrics.jsonl ends within a line",))
