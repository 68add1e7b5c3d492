"""Promises: a replay is begun from the page only where the server allows it, by a page of its own or a program with the
token, and only over settings that a replay may change, without paths; one runs at a time; it is stopped by request, by
its deadline and by the end of the server, and leaves nothing then; one that fails leaves the files that its log names;
a folder that cannot be written is refused; what it makes is a branch beside its run, into which nothing is written.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.core.errors import RunFolderError
from stretto.processes.heartbeat import PARENT
from stretto_report.watch.serve import watch
from stretto_report.watch.web.replay import COMMAND, Replays
from tests.launch.running import Laboratory, default_dispositions, wait_until
from tests.launch.running import laboratory as laboratory
from tests.watch.conftest import TOKEN, alone, serving
from tests.watch.runs import write_run

SYNCHRONOUS = Path(__file__).parent.parent / "data" / "synchronous_run"
BEARER = {"authorization": f"Bearer {TOKEN}"}
SLEEPING = """
import os, pathlib, sys, time
pathlib.Path(next(word for word in sys.argv if word.startswith("--out=")).partition("=")[2]).mkdir()
print(os.getpid(), os.environ.get("STRETTO_WATCH_PASSWORD"), *sys.argv[1:], flush=True)
time.sleep(3600)
"""
#: Another process does what this one is asked for.
WAITING = """
import json, os, pathlib, sys, time
target = pathlib.Path(next(word for word in sys.argv if word.startswith("--out=")).partition("=")[2])
pathlib.Path(os.environ["ASKED"]).write_text(json.dumps(sys.argv[1:]))
while not (target / "ended").exists():
    time.sleep(0.05)
"""
FAILING = """
import pathlib, sys
target = pathlib.Path(next(word for word in sys.argv if word.startswith("--out=")).partition("=")[2])
target.mkdir()
(target / "log.txt").write_text("the reason")
sys.exit(f"failed; see {target / 'log.txt'}")
"""


@pytest.fixture(autouse=True)
def foreground() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so does what it starts: a replay is killed then."""
    with default_dispositions():
        yield


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replays")


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory: pytest.TempPathFactory, replays: Path) -> Iterator[httpx.Client]:
    """A server whose replays never end by themselves."""
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "first")
    command = (sys.executable, "-c", SLEEPING)
    with serving(runs, tmp_path_factory.mktemp("cache"), Replays(replays, command)) as client:
        yield client


def _address(client: httpx.Client) -> str:
    return f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}/replay"


def _until(client: httpx.Client, *, log: str = "", state: str = "") -> dict[str, Any]:
    """The newest replay, once its log has a text, or it has come to a state."""
    until = time.monotonic() + 300
    while True:
        newest: dict[str, Any] = client.get("/api/replay").json()["newest"]
        if log in newest["log"] and newest["state"] in (state, newest["state"] if log else state):
            return newest
        assert newest["state"] == "running", newest
        assert time.monotonic() < until
        time.sleep(0.05)


def test_without_the_permission_nothing_is_begun(client: httpx.Client, first: str) -> None:
    assert client.get("/api/replay").json() == {"allowed": False, "newest": None}
    for path in (f"{first}/replay", "/api/replay/stop"):
        refused = client.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["where"]) == (403, "replay")
        assert "--allow-replay" in refused.json()["error"]["allowed"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer guess"}, 401),
        ({"cookie": "COOKIE"}, 403),  # without an Origin
        ({"cookie": "COOKIE", "origin": "http://evil.example"}, 403),
        ({"cookie": "COOKIE", "origin": "null"}, 403),
        ({"cookie": "COOKIE", "origin": "OWN", "sec-fetch-site": "cross-site"}, 403),
        ({"cookie": "COOKIE", "origin": "OWN", "content-type": "text/plain"}, 415),
        ({"cookie": "COOKIE", "origin": "OWN", "content-type": "application/x-www-form-urlencoded"}, 415),
        ({**BEARER, "content-type": "multipart/form-data"}, 415),
        ({**BEARER, "host": "evil.example"}, 403),
    ],
)
def test_another_site_begins_nothing(sleeping: httpx.Client, headers: dict[str, str], status: int) -> None:
    own = str(sleeping.base_url).rstrip("/")
    opened = httpx.get(f"{own}/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    given = {name: {"COOKIE": opened, "OWN": own}.get(value, value) for name, value in headers.items()}
    body = b'{"set": []}'
    asked = httpx.post(f"{own}{_address(sleeping)}", content=body, headers={"content-type": "application/json"} | given)
    assert asked.status_code == status
    assert sleeping.get("/api/replay").json()["newest"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "body"),
        (b"[1]", "body"),
        (b'{"set": ["trainer.steps=1"], "out": "/tmp/x"}', "out"),
        (b'{"from": "1"}', "from"),
        (b'{"from": -1}', "--from: -1"),
        (b'{"minutes": 0}', "minutes: 0"),
        (b'{"minutes": 1e300}', "minutes"),
        (b'{"set": ["task.kind=gsm8k", "rewards.function=evil:f"]}', "--set rewards.function: cannot be changed"),
        (b'{"set": ["trainer=1"]}', "a replay may change algorithm and trainer"),
        (b'{"set": ["--out=/tmp/x"]}', "cannot be changed"),
        (b'{"set": ["trainer.steps"]}', "SECTION.KEY=VALUE"),
        (b'{"set": ["trainer.steps=1\\n[task]"]}', "SECTION.KEY=VALUE"),
        (b'{"set": ["algorithm.reference.path=/etc"]}', "--set algorithm.reference.path: has a path"),
        (b'{"set": ["algorithm.reference={path=\\"..\\"}"]}', "has a path"),
        (b'{"set": ["algorithm.reference.path=~root"]}', "has a path"),
        (b'{"set": [' + b",".join([b'"trainer.steps=1"'] * 33) + b"]}", "33 settings"),
        (b'{"set": ["trainer.steps=' + b"1" * 70_000 + b'"]}', "body"),
    ],
)
def test_what_a_page_may_not_ask_is_refused_with_its_place(sleeping: httpx.Client, body: bytes, said: str) -> None:
    headers = {"content-type": "application/json"}
    refused = sleeping.post(_address(sleeping), content=body, headers=headers)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert sleeping.get("/api/replay").json()["newest"] is None
    assert sleeping.post("/api/runs/0123/replay", content=b"{}", headers=headers).status_code == 404


def test_one_runs_at_a_time_until_it_is_stopped_or_its_time_is_over(
    sleeping: httpx.Client, replays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_WATCH_PASSWORD", "a password")
    changes = ["trainer.learning_rate=0.5", "algorithm.loss=gspo"]
    asked: dict[str, Any] = {"from": 1, "set": changes}
    assert sleeping.post(_address(sleeping), json=asked).json()["state"] == "running"
    assert sleeping.post(_address(sleeping), json=asked).status_code == 429
    words = _until(sleeping, log="gspo")["log"].split()
    assert words[1] == "None"  # the password is not handed on
    assert [words[2], words[4], *words[6:]] == ["replay", "--from=1", *(f"--set={one}" for one in changes)]
    assert Path(words[5].partition("=")[2]).is_relative_to(replays)
    assert sleeping.post("/api/replay/stop", json={}).status_code == 200
    assert _until(sleeping, state="stopped")["reason"] == "stopped from the page"
    assert sleeping.post(_address(sleeping), json={"minutes": 0.001}).status_code == 200
    assert "waited 0.06 s" in _until(sleeping, state="stopped")["reason"]
    assert [path.name for path in replays.glob("*/*") if path.is_dir()] == []


def test_a_replay_ends_with_the_server(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    with alone(tmp_path, Replays(tmp_path / "replays", (sys.executable, "-c", SLEEPING))) as (client, run):
        assert client.post(f"{run}/replay", json={}).status_code == 200
        process = int(_until(client, log="--out")["log"].split()[0])
        os.kill(process, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert [path.name for path in (tmp_path / "replays").glob("*/*") if path.is_dir()] == []


def test_a_replay_that_fails_leaves_what_its_log_names(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    with alone(tmp_path, Replays(tmp_path / "replays", (sys.executable, "-c", FAILING))) as (client, run):
        assert client.post(f"{run}/replay", json={}).status_code == 200
        named = Path(_until(client, state="failed")["log"].split()[-1])
    assert named.read_text() == "the reason"


def test_a_folder_of_replays_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    (tmp_path / "replays").write_text("a file")
    with alone(tmp_path, Replays(tmp_path / "replays")) as (client, run):
        refused = client.post(f"{run}/replay", json={})
        assert (refused.status_code, refused.json()["error"]["where"]) == (400, "replay")
        assert str(tmp_path / "replays") in refused.json()["error"]["message"]
        assert client.get("/api/replay").json()["newest"] is None


def test_a_replay_is_a_command_of_its_own() -> None:
    surroundings = os.environ | {PARENT: str(os.getpid())}
    told = subprocess.run([*COMMAND, "replay", "--help"], env=surroundings, capture_output=True, text=True, check=True)
    assert "--from" in told.stdout


def test_a_replay_makes_a_branch_beside_its_run_and_leaves_the_run_as_it_was(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(SYNCHRONOUS, tmp_path / "runs" / "recorded"))
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "-shm" not in file.name}
    monkeypatch.setenv("ASKED", str(asked := tmp_path / "asked.json"))
    own = Replays(tmp_path / "runs" / "replays", (sys.executable, "-c", WAITING))
    with serving(tmp_path / "runs", tmp_path / "cache", own) as client:
        (run,) = client.get("/api/runs").json()["runs"]
        order = {"set": ["trainer.learning_rate=0.01"]}
        assert client.post(f"/api/runs/{run['id']}/replay", json=order).status_code == 200
        wait_until(lambda: asked.exists() and asked.read_bytes().endswith(b"]"), "the order")
        words = json.loads(asked.read_text())
        assert "steps 1 to 6 of" in laboratory.run(*words).well()
        (Path(words[-2].removeprefix("--out=")) / "ended").touch()
        made = _until(client, state="done")
        until = time.monotonic() + 100
        while not (found := client.get("/api/runs").json())["branches"]:  # runs are looked for once a second
            assert time.monotonic() < until
            time.sleep(0.05)
        (branch,) = found["branches"]
        assert (branch["id"], branch["run"], branch["first_step"]) == (made["branch"], run["id"], 0)
        assert list(branch["changes"]) == ["trainer.learning_rate"]
        assert {row["id"]: row["state"] for row in found["runs"]} == {run["id"]: "finished", branch["id"]: "finished"}
        names = {"names": "trainer.grad_norm"}
        curves = [client.get(f"/api/runs/{id}/series", params=names).json() for id in (run["id"], branch["id"])]
        assert curves[0]["series"] != curves[1]["series"]
        diff = client.get("/api/diff", params={"a": run["id"], "b": branch["id"]}).json()
        assert (diff["equal"], diff["step"]) == (False, 1)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "-shm" not in file.name} == kept


def test_replays_are_not_put_into_a_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    given: dict[str, Any] = {
        "host": "127.0.0.1", "port": 0, "token": "T", "password": None, "opens": False, "say": print,
    }  # fmt: skip
    with pytest.raises(RunFolderError, match="writes into no run"):
        watch([tmp_path], **given, replays=path / "replays")
