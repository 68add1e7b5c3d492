"""Promises: a request without the token, from another site, by another name of this machine, or for a path outside of
the runs is refused; a page can do nothing but show what its own files say; what a model said is JSON text, whatever it
said, and never too long; a run folder that is damaged, locked, of a newer format, half copied, or made of links and
pipes is shown with its fault, and the server serves the others.
"""

import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.core.errors import RunFolderError
from stretto.core.events import Span
from stretto.store import lock
from stretto.store.series.lines import SpanLog
from stretto_report.dashboard.timeline import plot_timeline
from stretto_report.dashboard.trace import export_trace
from stretto_report.reading.series import read_spans
from stretto_report.watch.serve import watch
from tests.store.lines import write_lines
from tests.store.make import ledger_at, sql
from tests.watch.conftest import TOKEN, alone, serving
from tests.watch.runs import HOSTILE, completion, step_line, train, write_run

BEARER = {"authorization": f"Bearer {TOKEN}"}
SECRET = "root:x:0:0"


def _bare(client: httpx.Client) -> httpx.Client:
    """A client that knows no token."""
    return httpx.Client(base_url=client.base_url, timeout=30, verify=False)


@pytest.fixture(scope="module")
def stranger(client: httpx.Client) -> Iterator[httpx.Client]:
    with _bare(client) as stranger:
        yield stranger


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/runs", {}, 401),
        ("/api/runs", {"authorization": "Bearer"}, 401),
        ("/api/runs", {"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ("/api/runs", {"authorization": f"Bearer {TOKEN}x"}, 401),
        ("/api/runs", {"authorization": f"Basic {TOKEN}"}, 401),
        (f"/api/runs?token={TOKEN}", {}, 401),  # an address is written down in too many places
        ("/?token=wrong", {}, 401),
        ("/?token=", {}, 401),
        ("/api/runs", {"cookie": f"stretto-watch-1={TOKEN}"}, 401),
        ("/api/runs", {"cookie": 'stretto-watch-1="; ='}, 401),
        ("/api/runs", {**BEARER, "host": "evil.example"}, 403),
        ("/api/runs", {**BEARER, "host": "127.0.0.1.evil.example"}, 403),
        ("/api/runs", {**BEARER, "host": "localhost@evil.example"}, 403),
        ("/api/runs", {**BEARER, "host": "192.0.2.7"}, 403),
        ("/api/runs", {**BEARER, "host": ""}, 403),
        ("/?token=" + TOKEN, {"host": "rebound.example"}, 403),
        ("/api/runs", {**BEARER, "origin": "http://evil.example"}, 403),
        ("/api/runs", {**BEARER, "origin": "null"}, 403),
        ("/api/runs", {**BEARER, "origin": "http://["}, 403),
        ("/api/runs", {**BEARER, "host": "[:::::]"}, 403),
        ("/?" + "&".join(["a=1"] * 9), {}, 401),
        ("/api/runs", {**BEARER, "sec-fetch-site": "cross-site"}, 403),
        ("/api/runs", {**BEARER, "sec-fetch-site": "same-site"}, 403),
        ("/api/runs/..%2f..%2f..%2fetc%2fpasswd", BEARER, 404),
        ("/api/runs/%2fetc", BEARER, 404),
        ("/assets/..%2f..%2fserve.py", {}, 401),
        ("/..%2fserve.py", BEARER, 404),
        ("/%2e%2e/serve.py", BEARER, 404),
        ("//etc/passwd", BEARER, 404),
        ("/api/nothing", BEARER, 404),
    ],
)
def test_who_may_not_ask_gets_nothing(stranger: httpx.Client, path: str, headers: dict[str, str], status: int) -> None:
    reply = stranger.get(path, headers=headers)
    assert reply.status_code == status
    assert "first" not in reply.text
    assert "set-cookie" not in reply.headers
    assert "access-control-allow-origin" not in reply.headers
    assert "content-security-policy" in reply.headers


@pytest.mark.parametrize("path", ["/../../../../etc/passwd", "/assets/../../../../../etc/passwd", "/api/runs/../../x"])
def test_a_raw_path_does_not_climb(client: httpx.Client, path: str) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode())
        reply = raw.recv(65_536)
    assert b" 404 " in reply.split(b"\r\n")[0]
    assert SECRET.encode() not in reply


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: httpx.Client, first: str, method: str) -> None:
    assert client.request(method, first).status_code == 405


@pytest.mark.parametrize(
    "asked",
    [
        "trajectories?where=((((",
        "trajectories?where=colour%3Dred",
        "trajectories?where=reward%3D1%3B%20DROP%20TABLE%20x",
        "trajectories?where=reward%3Dnan",
        "trajectories?where=" + "a" * 5_000,
        "trajectories?where=" + "%20and%20".join(["reward%3D1"] * 40),
        "trajectories?where=state%3D" + "%7C".join("a" * 100),
        "trajectories?sort=state;drop",
        "trajectories?limit=1000000000000000000000000000",
        "trajectories?limit=-1",
        "trajectories?offset=%D9%A1",  # a digit, and none of ASCII
        "series?names=__class__",
        "series?points=1",
        "timeline?pixels=1000000000",
        "timeline?from=nan",
        "timeline?from=2&to=1",
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_its_place(client: httpx.Client, first: str, asked: str) -> None:
    reply = client.get(f"{first}/{asked}")
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"where", "found", "allowed", "message", "status"}


@pytest.mark.parametrize(
    "path",
    [
        "trajectories/0.a.0/99999999999999999999",
        "trajectories/0.a.0/-1",
        "trajectories/x'--/0",
        "groups/%00",
        "groups/x",
    ],
)
def test_a_name_of_nothing_is_not_found(client: httpx.Client, first: str, path: str) -> None:
    assert client.get(f"{first}/{path}").status_code == 404


def test_a_filter_is_no_sql(client: httpx.Client, first: str) -> None:
    assert client.get(f"{first}/trajectories", params={"where": 'group="x\' OR 1=1 --"'}).json()["matched"] == 0


def test_the_token_opens_the_page_and_a_cookie_the_rest(client: httpx.Client) -> None:
    with _bare(client) as browser:
        cookie = browser.get("/", params={"token": TOKEN}, headers={"sec-fetch-site": "none"}).headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert browser.get("/api/runs").status_code == 200
        assert browser.get("/api/runs", headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("other", ['prefs={"dark": true}', "flag", "path=/tree", "name=Ada Lovelace", 'x="'])
def test_the_cookie_of_another_program_on_this_host_locks_nobody_out(client: httpx.Client, other: str) -> None:
    with _bare(client) as browser:
        cookie = browser.get("/", params={"token": TOKEN}).headers["set-cookie"].partition(";")[0]
    with _bare(client) as browser:
        assert browser.get("/api/runs", headers={"cookie": f"{other}; {cookie}"}).status_code == 200
        assert browser.get("/api/runs", headers={"cookie": f"{other}; {cookie}x"}).status_code == 401
        # Several guesses in one request are one guess.
        assert browser.get("/api/runs", headers={"cookie": f"{cookie}; {cookie}x"}).status_code == 401


def test_a_password_is_asked_for_and_a_wrong_one_opens_nothing(client: httpx.Client) -> None:
    with _bare(client) as browser:
        page = browser.get("/")
        assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
        assert "<script" not in page.text
        assert page.headers.get_list("referrer-policy") == ["same-origin"]  # or the form's Origin is null
        for body in (b"token=wrong", b"token=" + b"x" * 100_000):
            wrong = browser.post("/login", content=body)
            assert wrong.status_code == 401
            assert "set-cookie" not in wrong.headers
        foreign = browser.post("/login", content=f"token={TOKEN}", headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403
        assert browser.post("/login", content=f"token={TOKEN}").status_code == 303
        assert browser.get("/api/runs").status_code == 200


def test_a_page_may_do_nothing_but_show_its_own_files(client: httpx.Client, first: str) -> None:
    for path in ("/", "/api/runs", first, "/nothing", f"{first}/trajectories/0.a.0/1"):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        found = [policy[name] for name in ("default-src", "script-src", "frame-ancestors")]
        assert found == ["'none'", "'self'", "'none'"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert headers["cache-control"] == "no-store"


def test_what_a_model_said_is_text_in_json(client: httpx.Client, first: str) -> None:
    reply = client.get(f"{first}/trajectories/0.a.0/1")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["text"] == HOSTILE
    assert b"\x00" not in reply.content
    assert b"\x1b" not in reply.content


def test_an_answer_of_ten_megabytes_is_cut_and_its_end_can_be_seen(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "long")
    length = 30_000
    with ledger_at(path / "ledger.sqlite") as ledger:
        train(ledger, 3, "l", (completion("0.l.0", 0, 1.0, (2,) * length, "</b>" * 2_500_000),))
    with alone(tmp_path) as (client, run):
        reply = client.get(f"{run}/trajectories/0.l.0/0")
        assert len(reply.content) < 1_000_000
        found = reply.json()
        assert (found["tokens"], found["cut"]["more"], found["text_cut"]) == (length, True, True)
        assert len(found["segments"][0]["tokens"]["id"]) == 4_000
        last = client.get(f"{run}/trajectories/0.l.0/0", params={"offset": str(length - 2)}).json()
        assert last["segments"][0]["tokens"]["id"] == [length + 1, length + 2]
        assert len(client.get(f"{run}/groups/0.l.0").content) < 100_000


def _replace(name: str, data: bytes) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        for log in run.glob(f"{name}-*"):
            log.unlink()
        (run / name).write_bytes(data)

    return replace


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in the place of a file."""

    def replace(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return replace


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _cut(run: Path) -> None:
    _replace("ledger.sqlite", (run / "ledger.sqlite").read_bytes()[:3_000])(run)


def _far_step(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [step_line(step) for step in (1, 10**30, 2)])


def _sparse_log(run: Path) -> None:
    (run / "ledger.sqlite-wal").touch()
    os.truncate(run / "ledger.sqlite-wal", 100 << 30)


DEEP = b'{"kind":' + b"[" * 100_000 + b"\n"
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (_cut, "ledger.sqlite"),
    "garbage": (_replace("ledger.sqlite", b"no database" * 1_000), "ledger.sqlite"),
    "empty": (_replace("ledger.sqlite", b""), "ledger.sqlite"),
    "half": (lambda run: (run / "ledger.sqlite").unlink(), "ledger.sqlite: does not exist"),
    "newer": (lambda run: sql(run / "ledger.sqlite", "PRAGMA user_version = 99"), "format 99"),
    "huge": (lambda run: sql(run / "ledger.sqlite", "UPDATE trajectories SET tokens = 1 << 62"), "ledger.sqlite"),
    "ledger-link": (_instead("ledger.sqlite", _link), "a link"),
    "metrics-link": (_instead("metrics.jsonl", _link), "a link"),
    "recipe-link": (_instead("recipe.toml", _link), "a link"),
    "lock-pipe": (_instead("lock", os.mkfifo), "no plain file"),
    "log-pipe": (_instead("ledger.sqlite-wal", os.mkfifo), "no plain file"),
    "metrics-pipe": (_instead("metrics.jsonl", os.mkfifo), "no regular file"),
    "spans-pipe": (_instead("spans.jsonl", os.mkfifo), "no regular file"),
    "metrics-deep": (_replace("metrics.jsonl", DEEP), "metrics.jsonl: line 1"),
    "metrics-bytes": (_replace("metrics.jsonl", b"\xff\xfe\n"), "metrics.jsonl: line 1"),
    "spans-far": (
        _replace("spans.jsonl", b'{"role":"x","name":"y","start":1,"end":2,"version":%d}\n' % (18 * 10**18)),
        "spans",
    ),
    "recipe-broken": (_replace("recipe.toml", b"[trainer\n"), "recipe.toml"),
    "metrics-far": (_far_step, "metrics.jsonl: line 2 cannot be read: step has more than 64 bits"),
    "log-sparse": (_sparse_log, "ledger.sqlite-wal: is not checked: it has 107,374,182,400 bytes"),
    "recipe-digits": (_replace("recipe.toml", b"a = " + b"1" * 5_000), "recipe.toml: cannot be read"),
    "recipe-far": (_replace("recipe.toml", b"a = 0x" + b"f" * 8_000), "recipe.toml: cannot be read"),
    "recipe-dots": (_replace("recipe.toml", b"a." * 4_000 + b"a = 1"), "recipe.toml: cannot be read: line 1"),
    "recipe-deep": (_replace("recipe.toml", b"a = " + b"[" * 100_000), "recipe.toml"),
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of a folder of strange runs, one good one, and a link to a run elsewhere."""
    folder = tmp_path_factory.mktemp("strange")
    for name, (spoil, _) in FOLDERS.items():
        spoil(write_run(folder / name))
    write_run(folder / "good")
    write_run(folder / os.fsdecode(b"na\xffme<script>"))
    (folder / "outside").symlink_to(write_run(tmp_path_factory.mktemp("outside") / "secret"))
    with serving(folder, tmp_path_factory.mktemp("cache")) as client:
        yield client


@pytest.fixture(scope="module")
def ids(strange: httpx.Client) -> dict[str, str]:
    return {run["name"]: run["id"] for run in strange.get("/api/runs").json()["runs"]}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_strange_folder_is_shown_with_its_fault(strange: httpx.Client, ids: dict[str, str], name: str) -> None:
    address = f"/api/runs/{ids[name]}"
    start = time.monotonic()
    found = strange.get(address).json()
    assert FOLDERS[name][1] in f"{found['fault']} {found['reason']}"
    for part in ("series", "trajectories", "timeline", "health", "trajectories/0.a.0/0", "groups/0.a.0"):
        reply = strange.get(f"{address}/{part}")
        assert reply.status_code in (200, 404, 422), (part, reply.text)
        assert SECRET not in reply.text
    assert time.monotonic() - start < 20
    assert strange.get(f"/api/runs/{ids['good']}").json()["fault"] is None


def test_a_link_to_a_run_elsewhere_is_not_followed(ids: dict[str, str]) -> None:
    assert ids.keys() == {*FOLDERS, "good", "na�me<script>"}


def test_a_locked_ledger_is_a_fault_and_no_wait_for_the_others(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "locked")
    write_run(tmp_path / "runs" / "good")
    with (
        closing(sqlite3.connect(path / "ledger.sqlite", isolation_level=None)) as other,
        serving(tmp_path / "runs", tmp_path / "cache") as client,
    ):
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        held = lock.acquire(path)
        runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
        assert "locked" in runs["locked"]["fault"]
        assert runs["good"]["fault"] is None
        os.close(held)


def test_a_run_that_is_removed_while_it_is_watched_is_no_longer_there(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "gone")
    write_run(tmp_path / "runs" / "good")
    with serving(tmp_path / "runs", tmp_path / "cache") as client:
        runs = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        assert client.get(f"/api/runs/{runs['gone']}/trajectories").status_code == 200
        path.rename(tmp_path / "elsewhere")
        assert client.get(f"/api/runs/{runs['gone']}/trajectories").status_code in (404, 422)
        assert client.get(f"/api/runs/{runs['good']}/trajectories").status_code == 200


@pytest.mark.parametrize("password", [None, "", "short"])
def test_others_than_this_machine_need_a_password(tmp_path: Path, password: str | None) -> None:
    with pytest.raises(RunFolderError, match="STRETTO_WATCH_PASSWORD"):
        watch([tmp_path], host="0.0.0.0", port=0, token="t", password=password, opens=False, say=print)


def test_a_role_whose_number_is_no_decimal_has_a_lane_in_the_page_the_plot_and_the_trace(tmp_path: Path) -> None:
    role = "engine-²"
    run = write_run(tmp_path / "runs" / "one")
    SpanLog(run / "spans.jsonl").append([Span(role, "generate", 1.0, 2.0)])
    with alone(tmp_path) as (client, address):
        timeline = client.get(f"{address}/timeline")
        assert timeline.status_code == 200
        assert role in [lane["role"] for lane in timeline.json()["lanes"]]
    plot_timeline(tmp_path / "timeline.png", read_spans(run / "spans.jsonl"))
    assert export_trace(run, tmp_path / "trace.json") > 0
