"""Promises: each route answers what is on record of a run, by numbers worked by hand; what is filtered, sorted and
paged is what was asked for; reading leaves a run as it is, file for file; a run that goes on is followed, also through
a resume that rewinds it; what was read once is found again in the cache. The pages have the distance of each engine
from the trainer, as a series by step and as proofs by version, and the largest of all engines; a run without proofs has
no such series.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from stretto.core.records import Outcome, State, Verdict
from stretto.store import lock
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import MetricsLog, rewind_metrics
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.index.steps import Steps, curves
from stretto_report.watch.index.trajectories import Trajectories
from stretto_report.watch.runs.folder import logs_of
from stretto_report.watch.runs.run import WatchedRun
from stretto_report.watch.web.events import Follower
from tests.store.lines import write_lines
from tests.store.make import ledger_at, run_at, sql
from tests.watch.conftest import alone, serving
from tests.watch.runs import HOSTILE, LOG, completion, prompt, step_line, train, write_run

UNDECIDED = Verdict(Outcome.UNDECIDED, None, "no answer in 5 s")
SYNCHRONOUS = Path(__file__).parent.parent / "data" / "synchronous_run"


def test_the_list_has_the_run_with_its_state_and_its_newest_numbers(client: httpx.Client) -> None:
    (run,) = client.get("/api/runs").json()["runs"]
    assert (run["name"], run["state"], run["reason"], run["fault"]) == ("first", "finished", "", None)
    assert (run["step"], run["steps"], run["version"], run["task"], run["engines"]) == (2, 3, 2, "arithmetic", 2)
    assert (run["accuracy"], run["reward"], run["rl_seconds"], run["generated_tokens"]) == (0.5, 0.2, 4.0, 16)
    assert run["steps_per_second"] == 0.5  # one step in 2 s
    counts = {"issued": 8, "trained": 4, "failed": 2, "in_flight": 2, "buffered": 0, "filtered": 0, "expired": 0}
    assert run["trajectories"] == counts


def test_the_page_of_a_run_has_its_recipe_engines_and_series(client: httpx.Client, first: str) -> None:
    run = client.get(first).json()
    assert "steps = 3" in run["recipe"]
    engines = [(engine["name"], engine["host"]) for engine in run["engines_list"]]
    assert engines == [("engine-0", "node-3"), ("engine-1", "here")]
    assert {"reward", "trainer.loss", "busy.trainer", "masked_fraction"} <= set(run["series"])
    assert (run["totals"]["max_staleness"], run["indexed"], run["alarms"], run["trained_tokens"]) == (2.0, 1.0, [], 12)


def test_series_are_the_metrics_with_what_follows_from_them(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/series", params={"names": "reward,trainer.loss,masked_fraction,seconds_step"}).json()
    assert (found["steps"], found["points"], found["bucket"]) == (2, 2, 1)
    assert found["x"]["step"] == [1, 2]
    assert found["x"]["trained_tokens"] == [6, 12]
    assert found["x"]["trajectories"] == [2, 4]
    means = {name: curve["mean"] for name, curve in found["series"].items()}
    assert means == {
        "reward": [0.1, 0.2],
        "trainer.loss": [1.0, 0.5],
        "masked_fraction": [0.25, 0.25],
        "seconds_step": [2.0, 2.0],
    }
    evaluations = [(line["set"], line["step"], line["accuracy"]) for line in found["evaluations"]]
    assert evaluations == [("", 0, 0.25), ("", 2, 0.5)]


def test_a_dead_run_says_the_last_error_of_its_roles_and_raises_an_alarm(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", log=LOG)  # it neither ended nor runs
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "rewards-0.txt").write_text("judging\n")
    (path / "logs" / "trainer.txt").write_text("Traceback ...\nValueError: the loss is not finite\n")
    os.utime(path / "logs" / "rewards-0.txt", (1, 1))
    run = WatchedRun("id", path, "run", Cache(tmp_path / "cache"))
    run.advance(10.0)
    reason = run.condition().reason
    assert reason.startswith("its process is gone without a word")
    assert reason.endswith("; trainer said last: ValueError: the loss is not finite")
    dead = run.findings().alarms[0]
    assert (dead.name, dead.message, dead.look, dead.first_step) == ("dead_run", reason, "logs", 2)
    assert [*logs_of(path)] == ["run", "trainer", "rewards-0"]  # the newest first
    (path / "logs" / "trainer.txt").unlink()
    (path / "logs" / "trainer.txt").symlink_to(path / "recipe.toml")
    assert [*logs_of(path)] == ["run", "rewards-0"]  # a link is not followed


def test_a_log_that_is_removed_in_a_reading_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", log=LOG)
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "trainer.txt").write_text("step 1\n")
    found = [path / "logs" / "engine-0.txt", path / "logs" / "trainer.txt"]  # the first is gone
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(found))
    assert [*logs_of(path)] == ["run", "trainer"]


def test_a_dead_run_that_lost_lines_died_at_its_newest_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", log=LOG)
    (path / "metrics.jsonl").unlink()
    MetricsLog(path / "metrics.jsonl").append(step_line(2))
    run = WatchedRun("id", path, "run", Cache(tmp_path / "cache"))
    run.advance(10.0)
    assert [(alarm.name, alarm.first_step) for alarm in run.findings().alarms] == [("dead_run", 2)]


def test_the_newest_value_is_the_newest_and_no_mean_of_several_steps(tmp_path: Path) -> None:
    """Five steps in two points, of three and of two steps; the reward of a step is a tenth of its number."""
    write_lines(tmp_path / "metrics.jsonl", [step_line(step, entropy=1.0) for step in range(1, 6)])
    steps = Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache"))
    while steps.advance():
        pass
    reward = curves(steps, np.zeros(5), ["reward"], None, None, 2).series["reward"]
    assert reward.mean == pytest.approx([0.2, 0.45])
    assert reward.newest == 0.5


IDS = ["0.a.0/0", "0.a.0/1", "0.b.0/0", "0.b.0/1", "0.c.0/0", "0.c.0/1", "1.a.0/0", "1.a.0/1"]


@pytest.mark.parametrize(
    ("where", "places"),
    [
        ("", range(8)),
        ("state=trained", [0, 1, 2, 3]),
        ("state=trained and reward>=0.5", [0, 2]),
        ("reward=null", [4, 5, 6, 7]),
        ("reward!=null and reward<0.5", [1, 3]),
        ("reward=1|0.25", [0, 3]),
        ("state=failed|in_flight", [4, 5, 6, 7]),
        ("state!=trained", [4, 5, 6, 7]),
        ("reason~TIMEOUT", [4, 5]),
        ("stop=length", [1]),
        ("stop=null", [4, 5, 6, 7]),
        ("group=0.b.0", [2, 3]),
        ("group!=0.b.0|0.c.0", [0, 1, 6, 7]),
        ("prompt=a and verdict=right", [0]),
        ('text~"+4"', [2, 3]),
        ('text~"nowhere \\" or else"', []),
        ("staleness>=1", [2]),  # trained at version 1, with a token of version 0
        ("staleness=0", [0, 1, 3]),
        ("interrupted>0", [2]),
        ("length>2 AND step=1", [0]),
        ("member=1 and oldest<=1", [1, 3]),
        ("reward>inf", []),
    ],
)
def test_a_filter_lets_through_what_it_says(client: httpx.Client, first: str, where: str, places: list[int]) -> None:
    page = client.get(f"{first}/trajectories", params={"where": where}).json()
    assert [row["id"] for row in page["rows"]] == [IDS[place] for place in places]
    assert (page["total"], page["matched"]) == (8, len(list(places)))


@pytest.mark.parametrize(
    ("sort", "places"),
    [
        ("-id", [7, 6, 5, 4, 3, 2, 1, 0]),
        ("reward", [1, 3, 2, 0, 4, 5, 6, 7]),  # what has none comes last, either way
        ("-reward", [0, 2, 3, 1, 4, 5, 6, 7]),
        ("-length", [2, 0, 1, 3, 4, 5, 6, 7]),
        ("-staleness", [2, 0, 1, 3, 4, 5, 6, 7]),
        ("state", [4, 5, 6, 7, 0, 1, 2, 3]),
    ],
)
def test_rows_are_sorted_and_paged(client: httpx.Client, first: str, sort: str, places: list[int]) -> None:
    pages = [
        client.get(f"{first}/trajectories", params={"sort": sort, "offset": str(offset), "limit": "3"}).json()["rows"]
        for offset in (0, 3, 6, 9)
    ]
    assert [len(page) for page in pages] == [3, 3, 2, 0]
    assert [row["id"] for page in pages for row in page] == [IDS[place] for place in places]


def test_a_trajectory_says_of_each_token_what_became_of_it(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/trajectories/0.b.0/0").json()
    (segment,) = found["segments"]
    tokens = segment["tokens"]
    assert tokens["id"] == [3, 4, 5, 6]
    assert tokens["text"] == ["⟨3⟩", "⟨4⟩", "⟨5⟩", "⟨6⟩"]  # the run has no tokenizer
    assert tokens["version"] == [0, 1, 1, 1]
    assert tokens["staleness"] == [1, 0, 0, 0]
    assert tokens["logprob"] == [-0.5, -1.0, -1.5, -2.0]
    assert tokens["fate"] == ["masked", "trained", "clipped_high", "masked_by_correction"]
    assert tokens["trainer_logprob"] == [None, -1.0, -1.25, -2.5]
    assert tokens["difference"] == [None, 0.0, 0.25, -0.5]
    assert tokens["ratio"] == [None, 1.0, 1.5, 0.5]
    assert tokens["advantage"] == [None, 0.25, 0.25, 0.25]
    sums = {"in_loss": 3, "clipped_high": 1, "clipped_low": 0, "corrected": 1, "masked_by_correction": 1, "masked": 1}
    assert (found["training"], found["training_fault"]) == (sums, "")
    assert (found["prompt_text"], found["answer"], found["siblings"]) == ("7+4=", "11", ["0.b.0/0", "0.b.0/1"])
    life = [event["event"] for event in found["life"]]
    assert life == ["admitted", "begun", "interrupted", "moved", "ended", "judged", "buffered", "trained"]
    assert [event["token"] for event in found["life"]] == [None, 0, 1, 2, 4, None, None, None]
    assert (found["life"][-1]["step"], found["life"][3]["engine"]) == (2, "engine-1")


def test_a_window_of_tokens_is_cut_where_it_says(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/trajectories/0.b.0%2F0", params={"offset": "1", "limit": "2"}).json()
    assert (found["tokens"], found["cut"]) == (4, {"offset": 1, "limit": 2, "more": True})
    tokens = found["segments"][0]["tokens"]
    assert (tokens["id"], tokens["ratio"]) == ([4, 5], [1.0, 1.5])
    assert tokens["fate"] == ["trained", "clipped_high"]
    assert found["training"]["in_loss"] == 3  # of the whole trajectory


def test_one_in_flight_shows_the_tokens_that_are_journaled(client: httpx.Client, first: str) -> None:
    assert client.get(f"{first}/trajectories/1.a.0/0").json()["segments"][0]["tokens"]["fate"] == ["pending"] * 3
    assert client.get(f"{first}/trajectories/1.a.0/1").json()["segments"] == []


def test_a_recorded_run_has_its_text_token_by_token(tmp_path: Path) -> None:
    shutil.copytree(SYNCHRONOUS, tmp_path / "runs" / "recorded")
    with alone(tmp_path) as (client, address):
        (run,) = client.get("/api/runs").json()["runs"]
        assert (run["state"], run["step"], run["accuracy"]) == ("finished", 6, 0.5625)
        found = client.get(f"{address}/trajectories/0.56.0/0").json()
        assert "".join(found["segments"][0]["tokens"]["text"]).removesuffix("</s>").startswith(found["text"])
        assert "".join(found["prompt_tokens"]["text"]) == "6+0+3+0="


def test_a_group_shows_its_members_side_by_side(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/groups/0.a.0").json()
    assert (found["prompt"], found["answer"], found["mean_reward"]) == ("3+8=", "11", 0.5)
    assert [(member["member"], member["text"]) for member in found["members"]] == [(0, "11"), (1, HOSTILE)]
    assert [member["advantage"] for member in found["members"]] == [None, None]
    trained = client.get(f"{first}/groups/0.b.0").json()
    assert [member["advantage"] for member in trained["members"]] == [0.25, -0.25]


def test_a_group_of_a_prompt_with_a_slash_in_its_name_has_a_page(tmp_path: Path) -> None:
    """Sources of Reasoning Gym and loops of one's own name their prompts as they like."""
    with ledger_at(write_run(tmp_path / "runs" / "one") / "ledger.sqlite") as ledger:
        ledger.issue("1.gym/sums:7.0", prompt("gym/sums:7", "1+1="), 1, 2)
        ledger.settle("1.gym/sums:7.0/0", State.FAILED, "timeout after 1 s")
    with alone(tmp_path) as (client, run):
        group = client.get(f"{run}/groups/1.gym%2Fsums:7.0")
        assert (group.status_code, group.json().get("prompt_id")) == (200, "gym/sums:7")
        one = client.get(f"{run}/trajectories/1.gym%2Fsums:7.0/0").json()
        assert (one["group"], one["siblings"]) == ("1.gym/sums:7.0", ["1.gym/sums:7.0/0"])


def test_the_timeline_has_a_lane_for_each_role(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/timeline").json()
    assert (found["end"], found["spans"], found["in_window"]) == (4.0, 6, 6)
    lanes = [(lane["role"], lane["machine"]) for lane in found["lanes"]]
    assert lanes == [("trainer", ""), ("engine-0", "node-3"), ("engine-1", "here")]
    tiles = found["lanes"][1]["tiles"]
    assert (tiles["start"], tiles["end"]) == ([0.0, 1.0, 1.25], [1.0, 1.25, 3.0])
    assert [found["categories"][one] for one in tiles["category"]] == ["generate", "load", "generate"]
    part = client.get(f"{first}/timeline", params={"from": "1.1", "to": "1.2"}).json()
    assert [lane["tiles"]["name"] for lane in part["lanes"]] == [["update"], ["load"], ["generate"]]
    assert [mark["kind"] for mark in found["marks"]].count("step") == 1


def test_health_counts_states_reasons_and_prompts(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/health").json()
    assert found["states"] == {"trained": 4, "failed": 2, "in_flight": 2}
    assert found["verdicts"] == {"none": 4, "right": 2, "wrong": 2}
    assert found["truncation"] == {"share": 0.25, "by_step": {"step": [1, 2], "share": [0.5, 0.0]}}
    assert found["reasons"] == [{"state": "failed", "reason": "timeout after 1 s", "count": 2}]
    # by the totals and the ledger: 16 generated, of which 10 are on record, 9 of them trained
    assert (found["goodput"]["trained"]["tokens"], found["goodput"]["masked"]["tokens"]) == (9, 1)
    assert set(found["selection_bias"]) == {"length", "difficulty", "latency"}
    prompts = found["prompts"]
    assert [prompts[name] for name in ("asked", "never_solved", "always_solved", "sometimes")] == [2, 0, 0, 2]
    by_length = [(one["from"], one["to"], one["count"], one["mean"]) for one in found["reward_by_length"]]
    assert by_length == [(1, 2, 1, 0.25), (2, 3, 1, 0.0), (3, 4, 1, 1.0), (4, 5, 1, 0.75)]


def test_health_counts_what_repeats_and_says_why_completions_are_undecided(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "a")
    lines = [f'{{"id":"{name}","prompt":"{text}","answer":""}}\n' for name, text in zip("pqr", "121", strict=True)]
    (path / "questions.jsonl").write_text("".join(lines))
    undecided = msgspec.structs.replace(completion("2.x.0", 0, 0.0, (2,)), verdict=UNDECIDED)
    with ledger_at(path / "ledger.sqlite") as ledger:
        members = tuple(completion("1.b.0", member, 1.0, (1,) * length) for member, length in enumerate((2, 5, 5)))
        train(ledger, 3, "b", members)
        ledger.issue("2.x.0", prompt("x", "1+2="), 1, 2)
        ledger.settle("2.x.0/0", State.FAILED, "no answer in 5 s", undecided)
    with alone(tmp_path) as (client, address):
        found = client.get(f"{address}/health").json()
    # tokens of 0.a.0: 3 4 5, 3 4; of 0.b.0: 3 4 5 6, 3; of 1.b.0: 3 4, 3 4 5 6 7 twice; of 2.x.0: 3
    assert found["duplicates"]["answers"] == {"looked_at": 8, "duplicate": 2, "share": 0.25}
    assert found["duplicates"]["prompts"] == {"looked_at": 3, "duplicate": 2, "share": 2 / 3}
    assert sorted(one["count"] for one in found["duplicates"]["said_often"]) == [2, 2, 2]
    assert found["undecided"] == [{"state": "failed", "reason": "no answer in 5 s", "count": 1}]


def test_two_runs_part_at_a_step_and_a_token(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "other")
    folder = tmp_path / "runs" / "other"
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    with ledger_at(folder / "ledger.sqlite") as ledger:
        train(ledger, 1, "a", (completion("0.a.0", 0, 1.0, (0, 0, 0)), completion("0.a.0", 1, 0.0, (0, 0, 0))))
    (folder / "recipe.toml").write_text("[trainer]\nsteps = 5\n")
    with serving(tmp_path / "runs", tmp_path / "cache") as client:
        ids = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        found = client.get("/api/diff", params={"a": ids["one"], "b": ids["other"]}).json()
        token = found["token"]
        assert (found["equal"], found["step"], token["trajectory"], token["index"]) == (False, 1, "0.a.0/1", 2)
        assert (token["a"], token["b"]["id"]) == (None, 5)
        keys = client.get("/api/recipes", params={"runs": f"{ids['one']},{ids['other']}"}).json()["keys"]
        assert {"key": "trainer.steps", "values": [3, 5]} in keys
        assert client.get("/api/diff", params={"a": ids["one"], "b": ids["one"]}).json()["equal"] is True


def test_reading_leaves_a_run_as_it_is(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "first")
    before = {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with alone(tmp_path) as (client, address):
        for part in ("", "/series", "/trajectories", "/trajectories/0.a.0/0", "/timeline", "/health"):
            assert client.get(f"{address}{part}").status_code == 200
    assert {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def _events(client: httpx.Client, address: str) -> Iterator[tuple[str, Any]]:
    with client.stream("GET", f"{address}/events", headers={"last-event-id": "2"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def test_a_run_is_followed_through_steps_a_rewind_and_its_death(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "live", log=LOG)
    held = lock.acquire(path)
    with alone(tmp_path) as (client, address), RunFolder(path, held) as folder:
        assert client.get("/api/runs").json()["runs"][0]["state"] == "running"
        seen = _events(client, address)
        assert next(seen)[0] == "run"
        with closing(Ledger(folder.ledger, StoreConfig(), clock=lambda: 0.0)) as ledger:
            ledger.settle("1.a.0/0", State.FAILED, "no engine")
            train(ledger, 3, "c", (completion("0.d.0", 0, 1.0, (2, 2)),))
            MetricsLog(folder.metrics).append(step_line(3))
            data = next(data for name, data in seen if name == "step")
            assert (data["step"], data["values"]["reward"], data["x"]["trained_tokens"]) == (3, pytest.approx(0.3), 18)
            rows = client.get(f"{address}/trajectories").json()["rows"]
            assert (rows[6]["state"], rows[6]["reason"], rows[8]["id"]) == ("failed", "no engine", "0.d.0/0")
            rewind_metrics(folder.metrics, 1)
            assert next(name for name, _ in seen if name == "reset")
            assert client.get(f"{address}/series").json()["steps"] == 1
        folder.release()
        assert next(data for name, data in seen if name == "run" and data["state"] != "running")["state"] == "dead"
        seen.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("newest", [2, 3, 5, 7])
def test_a_page_that_comes_back_keeps_no_step_of_a_run_that_was_resumed_before_it(newest: int, tmp_path: Path) -> None:
    """It gets the steps since its last one, or loads its curves again if that was trained again meanwhile."""

    def follow(last: str | None) -> Follower:
        return Follower(WatchedRun("live", tmp_path, "live", Cache(tmp_path / "index.sqlite")), last)

    def news(follower: Follower) -> list[tuple[str, Any]]:
        return [(name, id) for name, id, _ in follower.news() if name in ("step", "reset")]

    write_lines(tmp_path / "metrics.jsonl", [step_line(step) for step in range(1, 5)])
    page = follow(None)
    [first] = [id for _, id, _ in page.news() if id]
    write_lines(tmp_path / "metrics.jsonl", [step_line(step) for step in range(1, 6)])
    [(_, last)] = news(page)
    assert news(follow(first)) == [("step", last)]
    assert news(follow(last)) == []
    write_lines(tmp_path / "metrics.jsonl", [step_line(step) for step in range(1, 8)])
    assert [name for name, _ in news(follow(last))] == ["step", "step"]
    again = [step_line(step, reward=0.1 * step + 0.5 * (step > 1)) for step in range(1, newest + 1)]
    write_lines(tmp_path / "metrics.jsonl", again)
    back = follow(last)
    assert [name for name, _ in news(back)] == ["reset"]
    write_lines(tmp_path / "metrics.jsonl", [*again, step_line(newest + 1)])
    assert [name for name, _ in news(back)] == ["step"]


def test_what_was_read_is_found_again_in_the_cache_unless_the_run_is_another(tmp_path: Path) -> None:
    path, cache = write_run(tmp_path / "run"), Cache(tmp_path / "index.sqlite")
    index = Trajectories(path, cache)
    assert index.advance() is False
    index.keep()
    again = Trajectories(path, cache)
    assert again.table["length"].tolist() == index.table["length"].tolist() == [3, 2, 4, 1, 0, 0, 0, 0]
    assert again.words["reason"].all == index.words["reason"].all
    shutil.rmtree(path)
    with run_at(path) as (_, ledger):
        train(ledger, 1, "b", (completion("0.z.0", 0, 1.0, (0,) * 7),))
    other = Trajectories(path, cache)
    assert other.advance() is False
    assert other.table["length"].tolist() == [7]
    other.keep()
    sql(tmp_path / "index.sqlite", "PRAGMA user_version = 1")  # an earlier stretto, which knew fewer columns
    assert Trajectories(path, cache).table.rows == 0
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 1000)
    assert Trajectories(path, cache).table.rows == 0


def test_the_canary_is_a_series_of_each_engine_and_of_the_worst(client: httpx.Client, first: str) -> None:
    names = client.get(first).json()["series"]
    assert [name for name in names if "canary" in name] == ["canary", "canary.engine-0", "canary.engine-1"]
    found = client.get(f"{first}/series", params={"names": "canary,canary.engine-0"}).json()["series"]
    assert (found["canary"]["mean"], found["canary.engine-0"]["mean"]) == ([0.05, 0.05], [0.04, 0.04])


def test_health_has_the_proofs_of_the_engines_by_version(client: httpx.Client, first: str) -> None:
    proofs = client.get(f"{first}/health").json()["canary"]
    assert [(one["which"], one["engine"], one["version"], one["proven"]) for one in proofs] == [
        ("newest", "engine-0", 2, True),
        ("newest", "engine-1", 1, True),
        ("worst", "engine-1", 0, False),
    ]
    assert [(one["distance"], one["tolerance"]) for one in proofs] == [(4e-8, 1e-6), (5e-8, 1e-6), (0.25, 1e-6)]


def steps_of(folder: Path, *canaries: dict[str, float]) -> Steps:
    """The table of a run with these distances, step by step."""
    write_lines(folder / "metrics.jsonl", [step_line(step, canary=found) for step, found in enumerate(canaries, 1)])
    steps = Steps(folder / "metrics.jsonl", Cache(folder / "cache"))
    steps.advance()
    return steps


def test_a_run_without_proofs_has_no_such_series(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, {})
    assert "canary" not in steps.names
    with pytest.raises(KeyError):
        steps.column("canary")


def test_an_engine_that_joins_later_has_no_distance_before(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, {"engine-0": 0.25}, {"engine-0": 0.25, "engine-1": 0.5}, {"engine-1": 0.75})
    assert steps.column("canary").tolist() == pytest.approx([0.25, 0.5, 0.75])
    assert steps.column("canary.engine-1").tolist() == pytest.approx([math.nan, 0.5, 0.75], nan_ok=True)


def test_the_seconds_of_a_step_are_what_the_sentence_below_their_curve_says(tmp_path: Path) -> None:
    pages = (Path(__file__).parent.parent.parent / "web" / "src" / "data" / "curves.ts").read_text(encoding="utf-8")
    [(named,)] = [re.findall(r"`(\w+)` of this step", line) for line in pages.split("\n") if " seconds_step:" in line]
    steps = steps_of(tmp_path, {}, {})
    assert steps.column("seconds_step")[1:].tolist() == np.diff(steps.column(named)).tolist() == [2.0]
