"""Promises: `stretto watch` prints one line with its address, serves the runs of the folders given, and ends at a
signal; a folder that is not there and a port in use are mistakes of the user; `inspect`, a terminal and the page have
the same alarms.
"""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.core.errors import RunFolderError
from stretto.store import lock
from stretto.store.series.metrics import read_metrics
from stretto_app.cli.main import inspect
from stretto_report.audit.alarms import AlarmWatch
from stretto_report.audit.evidence import Alarm
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.runs.run import WatchedRun
from stretto_report.watch.serve import watch
from stretto_report.watch.terminal import watch_in_terminal
from tests.launch.running import service
from tests.store.lines import write_lines
from tests.watch.runs import step_line, write_run


def start(folders: list[Path], port: int) -> None:
    watch(folders, host="127.0.0.1", port=port, token="T", password=None, opens=False, say=print)


def alarms(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `stretto inspect --json` says."""
    inspect(path, json=True)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["alarms"]
    return found


def alarms_of_page(path: Path) -> list[Alarm]:
    run = WatchedRun("id", path, "run", Cache(path.parent / "cache.sqlite"))
    while run.advance(1.0):
        pass
    return list(run.findings().alarms)


def written(path: Path, recipe: Callable[[str], str] = str, **changed: Any) -> Path:
    """A run of 30 steps with these numbers."""
    write_run(path)
    (path / "recipe.toml").write_text(recipe((path / "recipe.toml").read_text()))
    write_lines(path / "metrics.jsonl", [step_line(step, **changed) for step in range(1, 31)])
    return path


def test_the_command_prints_its_address_serves_and_ends_at_a_signal(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "first")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ("watch", runs, "--port", str(port), "--token", "T", "--no-open")
    with service(*words, serving="stretto watch: ") as (process, lines):
        assert lines == [f"stretto watch: http://127.0.0.1:{port}/?token=T\n"]
        found = httpx.get(f"http://127.0.0.1:{port}/api/runs", headers={"authorization": "Bearer T"}, timeout=30)
        assert [run["name"] for run in found.json()["runs"]] == ["first"]
        with pytest.raises(RunFolderError, match=str(port)):
            start([runs], port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.said()[0] == lines[0]


def test_a_folder_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nowhere: does not exist"):
        start([tmp_path, tmp_path / "nowhere"], 0)


def test_inspect_has_the_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run")
    lines = [step_line(step, entropy=1.0 if step <= 10 else 0.01) for step in range(1, 31)]
    write_lines(path / "metrics.jsonl", lines)
    (alarm,) = alarms(path, capsys)
    # a window of ten with k steps of 0.01 has mean 1 - 0.099 k: below 0.2 from k = 9 on
    assert (alarm["name"], alarm["first_step"], alarm["look"]) == ("entropy_collapse", 19, "series:trainer.entropy")
    inspect(path)
    *_, said, looked_at = capsys.readouterr().out.splitlines()
    assert said.startswith("alarm  entropy collapse since step 19: the entropy fell from 1 to 0.01 nats")
    assert looked_at.startswith("alarms  1 of ")
    assert "not measured: " in looked_at


def test_the_terminal_inspect_and_the_page_agree_on_a_bound_that_adapts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path / "run",
        lambda recipe: recipe.replace("max_staleness = 2.0", 'max_staleness = "auto"'),
        staleness_mean=1.9,
        max_staleness=2.0,
    )
    (alarm,) = alarms(path, capsys)
    assert (alarm["name"], alarm["first_step"]) == ("staleness_at_bound", 10)
    watch = AlarmWatch(path)
    for line in read_metrics(path / "metrics.jsonl")[0]:
        watch.step(line)
    assert list(watch.sentences()) == ["staleness at its bound"]
    assert [one.name for one in alarms_of_page(path)] == ["staleness_at_bound"]


@pytest.mark.parametrize(
    ("dtype", "error", "canary", "named"),
    [
        # float32 rounds by much less than 1e-3; of bfloat16 it is nothing
        ("float32", 2e-3, 0.05, ["mismatch"]),
        ("bfloat16", 2e-3, 0.05, []),
        ("bfloat16", 0.2, 0.05, ["mismatch"]),
        ("float32", 1e-7, 0.5, ["canary_drifting"]),
    ],
)
def test_the_terminal_inspect_and_the_page_agree_on_engines_that_are_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, error: float, canary: float, named: list[str]
) -> None:
    path = written(
        tmp_path / "run",
        lambda recipe: f'{recipe}[engine]\ndtype = "{dtype}"\n',
        trainer={"behavior_logprob_error": error},
        canary={"engine-1": canary},
    )
    assert [alarm["name"] for alarm in alarms(path, capsys)] == named
    watch_in_terminal([path], lambda seconds: True)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm  ")]
    assert [one.name for one in alarms_of_page(path)] == named
    assert said == [str(one) for one in alarms_of_page(path)]


def test_inspect_knows_the_steps_of_the_recipe_and_leaves_a_bad_line_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run")  # 2 of 3 steps
    lines = (path / "metrics.jsonl").read_bytes().split(b"\n")
    (path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"{bad", *lines[1:]]))
    with (path / "large").open("wb") as file:
        file.truncate(1 << 43)
    held = lock.acquire(path)
    (alarm,) = alarms(path, capsys)
    os.close(held)
    assert alarm["name"] == "disk_filling"
    # 8 TiB in 2 steps: 4 TiB in the one that is left
    assert "; the 1 step that is left will write about 4096.00 GiB" in alarm["message"]


def test_neither_password_nor_token_is_where_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nf="${{1#file://}}"\n(echo "$1"; stat -c %a "$f"; cat "$f") > {seen}\n')
    browser.chmod(0o755)
    for name, value in {"STRETTO_WATCH_PASSWORD": "a-password", "BROWSER": f"{browser} %s"}.items():
        monkeypatch.setenv(name, value)
    with service("watch", tmp_path / "runs", "--port", "0", serving="stretto watch: ") as (process, lines):
        address = lines[0].rpartition(" ")[2].strip()
        assert httpx.get(address, timeout=30).status_code in (200, 404)  # it is open; 404: no front end is built
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    argument, mode, page = seen.read_text().strip().split("\n")
    assert "a-password" not in address
    assert address.partition("token=")[2] not in argument
    assert (mode, f'content="0; url={address}"' in page) == ("600", True)
    assert not Path(argument.removeprefix("file://")).exists()
