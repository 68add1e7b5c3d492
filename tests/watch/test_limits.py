"""Promises: of too many runs the newest are shown, and how many are left out is said; open runs together hold a bounded
number of bytes, also when they are only followed, and a follower does not push another run out; a tokenizer that
cannot be read is a fault; prompts are searched piece by piece. A wrong secret costs a wait wherever it was shown, and
no other caller anything;
the names of the machine are looked up once; one comparison is made at a time, and no reading holds up the end of the
process; what is the matter with one run, one line or one file of the cache leaves the others as they are; a recipe
is read once, a ledger opened once for a row; an alarm of a running run ends with it.
"""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.responses import Response

from stretto.core.errors import StrettoError
from stretto.processes.http.asgi import HostNames
from stretto.processes.http.server import HttpServer, settings_of
from stretto.store import lock
from stretto.store.ledger.schema import log_of
from stretto_report.watch.index import files
from stretto_report.watch.index import trajectories as trajectories_module
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.index.files import read_ledger
from stretto_report.watch.index.steps import Steps
from stretto_report.watch.index.trajectories import Trajectories, count_states
from stretto_report.watch.runs import run as run_module
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.runs.questions import PromptTexts, Searched
from stretto_report.watch.runs.run import RunSummary, WatchedRun
from stretto_report.watch.web import app as app_module
from stretto_report.watch.web import pages
from stretto_report.watch.web.events import Follower
from stretto_report.watch.web.guard import Guard
from stretto_report.watch.web.pages import list_page
from tests.processes.test_http_server import serving as serving_at
from tests.store.lines import write_lines
from tests.store.make import ledger_at
from tests.store.test_others_files import killed
from tests.watch.conftest import alone, serving
from tests.watch.runs import prompt, step_line, write_run

SYNCHRONOUS = Path(__file__).parent.parent / "data" / "synchronous_run"


def _watched(path: Path) -> WatchedRun:
    return WatchedRun("id", path, "name", Cache(path.parent / "cache.sqlite"))


def _steps(path: Path, *steps: int) -> Steps:
    """The table of a run with these steps."""
    write_lines(path, [step_line(step) for step in steps])
    table = Steps(path, Cache(path.parent / "cache.sqlite"))
    assert table.advance() is False
    return table


def test_wrong_secrets_wait_for_each_other_everywhere(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = f"stretto-watch-{client.base_url.port}=guess"
    asked = [("/api/runs", {"authorization": "Bearer guess"}), ("/?token=guess", {}), ("/api/runs", {"cookie": cookie})]
    monkeypatch.setattr("stretto_report.watch.web.guard._WRONG_SECONDS", 0.2)
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda one: httpx.get(client.base_url.join(one[0]), headers=one[1], timeout=30), asked))
    assert [reply.status_code for reply in replies] == [401] * 3
    assert time.monotonic() - start >= 0.6


def test_those_who_guess_do_not_shut_out_who_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight guesses that wait for their replies, over four connections that strangers may have."""
    monkeypatch.setattr("stretto_report.watch.web.guard._WRONG_SECONDS", 600.0)
    guard = Guard(Response("inner"), "secret", 80, HostNames(loopback=True))
    asked = b"GET /api/runs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"
    with serving_at(HttpServer(settings_of(guard), strangers=4)) as address, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(address)).sendall(asked % b"guess")
        time.sleep(0.3)  # they wait
        client = stack.enter_context(socket.create_connection(address, timeout=20))
        client.sendall(asked % b"secret")
        assert client.recv(12) == b"HTTP/1.1 200"
        until = time.monotonic() + 20
        while len(guard._wrong._waiters or ()) > 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(guard._wrong._waiters or ()) <= 3, "those who were turned out wait no longer"


async def test_the_names_of_the_machine_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Response("inner"), "secret", 80, HostNames(loopback=False))
    name = socket.gethostname()
    monkeypatch.delattr(socket, "getfqdn")
    monkeypatch.delattr(socket, "gethostname")
    for host, status in ((name, 200), ("elsewhere.example", 403)):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as asking:
            headers = {"host": host, "authorization": "Bearer secret"}
            assert (await asking.get("http://here/api/runs", headers=headers)).status_code == status


def test_a_second_comparison_is_refused_while_one_is_made(tmp_path: Path) -> None:
    path, other = write_run(tmp_path / "runs" / "a"), write_run(tmp_path / "runs" / "b")
    assert other.is_dir()
    with serving(tmp_path / "runs", tmp_path / "cache") as client, ThreadPoolExecutor(2) as pool:
        ids = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        with closing(sqlite3.connect(path / "ledger.sqlite", isolation_level=None)) as writer:
            writer.execute("PRAGMA journal_mode = DELETE")
            writer.execute("BEGIN EXCLUSIVE")
            held = lock.acquire(path)
            asked = {pool.submit(client.get, "/api/diff", params=ids) for _ in range(2)}
            done, waiting = wait(asked, 30, FIRST_COMPLETED)
            assert [reply.result().status_code for reply in done] == [429]
        os.close(held)
        assert [reply.result().status_code for reply in waiting] == [200]


def test_the_end_of_the_process_waits_for_no_reading() -> None:
    program = "import time\nfrom stretto_report.watch.web.app import ReadingThread as Thread\n"
    program += "Thread('w').submit(time.sleep, 3600)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_run_that_cannot_be_summed_up_is_a_row_among_the_others(tmp_path: Path) -> None:
    class Broken(WatchedRun):
        def summary(self) -> RunSummary:
            raise ZeroDivisionError("by zero")

    class Both(Catalog):
        def all(self) -> list[WatchedRun]:
            return [Broken("x", tmp_path, "broken", Cache(tmp_path / "c")), *super().all()]

    write_run(tmp_path / "runs" / "good")
    rows = list_page(Both([tmp_path / "runs"], tmp_path / "cache"))["runs"]
    assert [(row.name, row.state, row.fault) for row in rows] == [
        ("broken", "unreadable", "by zero"),
        ("good", "finished", None),
    ]


def test_a_row_reads_the_recipe_once_and_opens_the_ledger_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, opened = _watched(write_run(tmp_path / "run")), list[Path]()

    def counting(folder: Path) -> AbstractContextManager[sqlite3.Connection]:
        opened.append(folder)
        return read_ledger(folder)

    monkeypatch.setattr(run_module, "read_ledger", counting)
    row = run.summary()
    assert (row.step, row.engines, row.trajectories["issued"] if row.trajectories else None) == (2, 2, 8)
    assert opened == [run.folder]
    assert run.recipe() is run.recipe()
    (run.folder / "recipe.toml").write_text("[trainer]\nsteps = 40\n")
    assert run.summary().steps == 40


def test_the_list_counts_alarms_of_runs_that_are_not_open_once_while_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ill = [step_line(step, accuracy=0.8 if step < 15 else 0.0) for step in range(1, 31)]
    for name, steps in (("ill", ill), ("large", ill), ("short", ill[:2])):
        write_lines(write_run(tmp_path / "runs" / name) / "metrics.jsonl", steps)
    with (tmp_path / "runs" / "large" / "metrics.jsonl").open("ab") as file:
        file.truncate(run_module._LARGEST_READ + 1)
    catalog, read = Catalog([tmp_path / "runs"], tmp_path / "cache"), list[Path]()

    class Counted(Steps):
        def __init__(self, path: Path, cache: Cache) -> None:
            read.append(path.parent)
            super().__init__(path, cache)

    def listed() -> dict[str, int | None]:
        return {row.name: row.alarms for row in list_page(catalog)["runs"]}

    monkeypatch.setattr(run_module, "Steps", Counted)
    monkeypatch.setattr(run_module, "_COUNT_SHARE", 0)
    monkeypatch.setattr(pages, "_ALARMS_SECONDS", 0.0)
    assert listed() == {"ill": None, "large": None, "short": None}
    monkeypatch.setattr(pages, "_ALARMS_SECONDS", 20.0)
    assert listed() == listed() == {"ill": 1, "large": None, "short": 0}
    assert sorted(folder.name for folder in read) == ["ill", "short"]
    write_lines(tmp_path / "runs" / "ill" / "metrics.jsonl", ill[:14])
    assert listed()["ill"] == 0
    assert not any(run.is_open for run in catalog.all())


def test_a_killed_run_where_nothing_can_be_written_is_copied_once_while_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    runs = [killed(write_run(tmp_path / "runs" / name)) for name in ("one", "other")]
    catalog, copied, copy = Catalog([tmp_path / "runs"], tmp_path / "cache"), list[Path](), shutil.copyfile

    def counted(own: Path, to: Path) -> None:
        copied.append(own)
        copy(own, to)

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(shutil, "copyfile", counted)
    for _ in range(3):
        assert [row.trajectories and row.trajectories["issued"] for row in list_page(catalog)["runs"]] == [8, 8]
        for run in catalog.all():
            run.advance(1.0)
            assert run.inspection() is not None
            assert pages.run_page(run, {})["indexed"] == 1.0
    ledgers = [run / "ledger.sqlite" for run in runs]
    assert sorted(copied) == sorted([*ledgers, *map(log_of, ledgers)])
    os.utime(ledgers[0])
    list_page(catalog)
    assert copied[4:] == [ledgers[0], log_of(ledgers[0])]
    assert len(list(place.iterdir())) == 2
    monkeypatch.setattr(files, "_MOST_COPIED", 1)
    os.utime(ledgers[0])
    list_page(catalog)
    assert len(list(place.iterdir())) == 1
    files._COPIES.clear()
    assert list(place.iterdir()) == []


def test_an_alarm_of_a_running_run_ends_with_it(tmp_path: Path) -> None:
    run = _watched(write_run(tmp_path / "run"))
    with (run.folder / "large").open("wb") as file:
        file.truncate(1 << 43)  # 8 TiB in 2 steps of 3
    held = lock.acquire(run.folder)
    while run.advance(1.0):
        pass
    assert [alarm.name for alarm in run.findings().alarms] == ["disk_filling"]
    os.close(held)
    assert run.findings().alarms == []


def test_metrics_that_were_written_again_in_place_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = _steps(path, 1, 2)
    for numbers in ([5, 6, 7], [5, 6, 7, 8]):  # the same file, and longer
        write_lines(path, [step_line(step) for step in numbers])
        assert steps.advance() is False
        assert (steps.table["step"].tolist(), steps.epoch) == (numbers, 1)


def test_a_number_that_no_column_can_hold_leaves_the_lines_beside_it(tmp_path: Path) -> None:
    steps = _steps(tmp_path / "metrics.jsonl", 1, 1 << 63, 3)
    assert steps.table["step"].tolist() == [1, 3]
    assert steps.fault == "metrics.jsonl: line 2 cannot be read: step has more than 64 bits"


def test_of_too_many_runs_the_newest_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        os.utime(write_run(tmp_path / "runs" / name) / "recipe.toml", (1e9 - age, 1e9 - age))
    found = list_page(Catalog([tmp_path / "runs"], tmp_path / "cache", most_runs=2))
    assert ([row.name for row in found["runs"]], found["left_out"]) == (["new", "middle"], 1)
    with serving(tmp_path / "runs", tmp_path / "cache") as client:
        assert client.get("/api/runs").json()["left_out"] == 0


def test_open_runs_hold_a_bounded_number_of_bytes_and_a_follower_pushes_none_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    alone = Catalog([tmp_path], tmp_path / "cache")
    first, second = sorted(alone.all(), key=lambda run: run.name)
    follower = Follower(first, None)
    for run in (first, second):
        alone.opened(run)
        while run.advance(1.0):
            pass
    assert {name for name, *_ in follower.news()} >= {"run", "trajectories"}
    assert alone._most_held > first.held + second.held
    alone.give_up()
    assert first.is_open
    alone._most_held = second.held
    alone.give_up()
    assert (first.is_open, first.held, second.is_open) == (False, 0, True)
    assert [name for name, *_ in follower.news()] == ["standing", "run"]
    assert not first.is_open
    assert follower.news() == []
    first.advance(1.0)  # a page of it was asked for
    assert follower.news()[0][0] == "reset"


def test_runs_that_are_only_followed_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    with serving(tmp_path / "runs", tmp_path / "cache", most_held=1) as client, ThreadPoolExecutor(1) as pool:
        first, second = (f"/api/runs/{run['id']}/events" for run in client.get("/api/runs").json()["runs"])
        with client.stream("GET", first) as one:
            lines = one.iter_lines()
            assert "event: trajectories" in lines  # its tables are read
            with client.stream("GET", second) as other:
                assert "event: trajectories" in other.iter_lines()
                assert pool.submit(lambda: "event: standing" in lines).result(20)


def test_a_run_that_has_gone_while_tables_are_given_up_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    catalog = Catalog([tmp_path], tmp_path / "cache", most_held=1)

    class Going(WatchedRun):
        @property
        def held(self) -> int:
            catalog._runs = {}  # as a look does that finds it gone
            return 2

    first, last = catalog.all()
    catalog._runs[last.id] = Going(last.id, last.folder, last.name, Cache(tmp_path / "cache.sqlite"))
    catalog.opened(first)
    catalog.opened(last)
    catalog.give_up()
    assert catalog._open == [last.id]


def test_a_tokenizer_that_cannot_be_read_is_a_fault_until_it_can(tmp_path: Path) -> None:
    policy = write_run(tmp_path / "runs" / "a") / "policy" / "v000000"
    with alone(tmp_path) as (client, address):
        trajectory = f"{address}/trajectories/0.a.0/0"
        found = client.get(trajectory).json()
        assert found["tokenizer_fault"].startswith("tokenizer.json: no policy of the run has one")
        policy.mkdir(parents=True)
        (policy / "tokenizer.json").write_text('{"version": ')  # half copied
        until = time.monotonic() + 100
        while "cannot be read" not in (said := client.get(trajectory).json()["tokenizer_fault"]):
            assert time.monotonic() < until
        assert said.endswith("tokens are shown as their numbers")
        assert client.get("/api/runs").json()["runs"][0]["fault"] == said
        shutil.copy(SYNCHRONOUS / "policy" / "v000000" / "tokenizer.json", policy / "tokenizer.json")
        while (found := client.get(trajectory).json())["segments"][0]["tokens"]["text"][0] == "⟨3⟩":
            assert time.monotonic() < until
        assert found["tokenizer_fault"] is None
        assert client.get("/api/runs").json()["runs"][0]["fault"] is None


def test_prompts_are_searched_piece_by_piece_and_asked_again_the_search_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    prompts = [f"needle {at} " + "x" * 700_000 for at in range(6)]  # pieces of a mebibyte to the end of a line
    lines = [{"id": str(at), "prompt": text, "answer": ""} for at, text in enumerate(prompts)]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    questions = PromptTexts(path)
    found = [questions.search("NEEDLE", 0.0), questions.search("needle 5", 0.0), questions.search("NEEDLE", 0.0)]
    assert [sorted(one.ids) for one in found] == [["0", "1"], [], ["0", "1", "2", "3"]]
    assert found[0].share == pytest.approx(1 / 3, abs=1e-3)
    assert questions.search("NEEDLE", 60.0) == Searched(frozenset("012345"), 1.0)
    assert PromptTexts(tmp_path / "none").search("x", 0.0) == Searched(frozenset(), 1.0)


def test_what_the_dashboard_refuses_is_in_the_tree_of_errors() -> None:
    kinds = [kind for kind in vars(app_module).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    own = [kind for kind in kinds if kind.__module__.startswith("stretto")]
    assert len(own) >= 2
    assert [kind for kind in own if not issubclass(kind, StrettoError)] == []


def test_trajectories_are_counted_once_while_a_ledger_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories_module, "_LONG_SECONDS", 0.0)  # as if there were a million of them
    path, cache, asked = write_run(tmp_path / "run"), Cache(tmp_path / "cache.sqlite"), list[str]()

    def counted() -> dict[str, int]:
        with read_ledger(path) as connection:
            connection.set_trace_callback(asked.append)
            return count_states(connection, path, cache)

    assert counted() == counted() == {"trained": 4, "failed": 2, "in_flight": 2}
    assert len(asked) == 1
    with ledger_at(path / "ledger.sqlite") as ledger:
        ledger.issue("2.x.0", prompt("x", "1+2="), 3, 2)
        ledger.flush()
    assert counted()["in_flight"] == 5


def test_a_ledger_whose_last_rows_fill_a_piece_is_kept_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories_module, "_AT_ONCE", 4)  # of the 8 that the run has
    monkeypatch.setattr(trajectories_module, "_KEPT_FROM", 0)
    path, cache = write_run(tmp_path / "run"), Cache(tmp_path / "cache.sqlite")
    first = Trajectories(path, cache)
    while first.advance():
        pass
    assert (first.table.rows, Trajectories(path, cache).table.rows) == (8, 8)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    cache = Cache(tmp_path)  # a folder in the place of its file
    cache.save("steps", {}, None)
    assert cache.load("steps", int) is None
