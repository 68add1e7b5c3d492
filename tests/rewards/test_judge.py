"""A judge behind an address: a real server, whose replies are written down.

Promises: the reward is the score that the reply ends with; a judge that is busy is asked again, one that refuses is
not; whatever goes wrong with it leaves the completion undecided, in time, and never makes it a zero.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.functions import Undecided
from stretto.rewards.service.wire import ScoreItem
from stretto_verify.models import Judge, JudgeConfig
from tests.rewards.replying import Question, Reply, ReplyServer, serving
from tests.rewards.scoring import scored


def chat(question: Question, said: str) -> bytes:
    return ended(said, "stop")


def ended(said: str | None, reason: str | None, **message: str) -> bytes:
    """A reply with its finish reason; None: it names none."""
    told = {} if reason is None else {"finish_reason": reason}
    return json.dumps({"choices": [{"index": 0, "message": {"content": said, **message}, **told}]}).encode()


@pytest.fixture
def server() -> Iterator[ReplyServer]:
    with serving(chat, (200, "Score: 10")) as server:
        yield server


def judge(server: ReplyServer, **settings: Any) -> Judge:
    return Judge(JudgeConfig(address=f"{server.address}/v1", model="m", **{"wait": 0.01, **settings}))


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        *[("Good.\nScore: 10", 1.0), ("Score: 0", 0.0), ("It says Score: 10, which is an order. Score: 2", 0.2)],
        *[("**Score: 7.5**", 0.75), ("Score: 7/10.", 0.7), ("Score: 4/5", 0.8), ("Score: 1.5 / 2.0", 0.75)],
        *[("Score: .5", 0.05), ("Score... 7", 0.7), ("Score: .5/1", 0.5)],
        ("score = 3\n", 0.3),
    ],
)
def test_the_reward_is_the_score_that_the_reply_ends_with(server: ReplyServer, said: str, reward: float) -> None:
    server.replies = [(200, said)]
    assert judge(server)("q", "c", "a") == reward


@pytest.mark.parametrize(
    "reply",
    [
        *[(200, "Fine."), (200, ""), (200, "Score: 11"), (200, "Score: -1"), (200, "Score: 10 would be too much")],
        *[(200, "Score: -.5"), (200, "Score: −3"), (200, "Score: 5%"), (200, f"Score: {'9' * 400}/{'9' * 400}")],
        *[(200, b"no JSON"), (200, b"{}"), (200, b'{"choices": []}')],
        *[(200, ended(None, "stop")), (400, "bad"), (401, "no key")],
        *[(404, "no such model"), (500, "broken"), (503, "busy")],
    ],
)
def test_a_judge_without_a_score_leaves_the_completion_undecided(server: ReplyServer, reply: Reply) -> None:
    server.replies = [reply]
    with pytest.raises(Undecided, match="judge"):
        judge(server)("q", "c", "a")
    assert len(server.seen) == (3 if reply[0] >= 500 else 1)


@pytest.mark.parametrize("score", ["0", "1", "10"])
@pytest.mark.parametrize(
    "reason", ["length", "max_tokens", "content_filter", "refusal", "tool_calls", "function_call", "abort", "", None]
)
def test_a_reply_that_did_not_end_by_itself_is_no_verdict(server: ReplyServer, reason: str | None, score: str) -> None:
    """Of a score of 10 that is cut off the first digit is left, and a rubric may end in "score: 0"."""
    server.replies = [(200, ended(f"One sign is wrong. Score: {score}", reason))]
    with pytest.raises(Undecided, match="did not end by itself"):
        judge(server)("q", "c", "a")
    server.replies = [(200, ended(f"Score: {score}", "stop", refusal="I cannot grade this."))]
    with pytest.raises(Undecided, match="the judge refuses"):
        judge(server)("q", "c", "a")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_follows_no_redirect(server: ReplyServer, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    with serving(chat, (200, "Score: 10")) as other:
        server.replies, server.headers = [(status, "")], {"Location": f"{other.address}/v1/chat/completions"}
        with pytest.raises(Undecided, match=f"redirects to {other.address}"):
            judge(server, key_variable="JUDGE_KEY")("q", "c", "a")
        assert (len(server.seen), other.requests) == (1, 0)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_busy_judge_is_asked_again(server: ReplyServer, status: int) -> None:
    server.replies = [(status, "later"), (status, "later"), (200, "Score: 4")]
    server.headers = {"Retry-After": "0"}
    assert judge(server)("q", "c", "a") == 0.4
    assert len(server.seen) == 3


def test_it_is_asked_about_this_completion_with_its_key(server: ReplyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    asked = judge(server, prompt="{prompt}|{completion}|{answer}|{full}", full=5, key_variable="JUDGE_KEY")
    server.replies = [(200, "Score: 5")]
    assert asked("is {answer} it?", "{prompt} {full}", "42") == 1.0
    [(path, question)], [key] = server.seen, server.keys
    assert (path, key, question["model"]) == ("/v1/chat/completions", "Bearer k1", "m")
    assert question["messages"] == [{"role": "user", "content": "is {answer} it?|{prompt} {full}|42|5"}]


def test_a_judge_that_drips_is_given_up_in_time(server: ReplyServer) -> None:
    server.drip = 0.05
    start = time.monotonic()
    with pytest.raises(Undecided, match="no reply in time"):
        judge(server, seconds=0.3)("q", "c", "a")
    assert time.monotonic() - start < 10.0
    server.drip = 0.0


def test_a_judge_that_drips_its_headers_has_one_deadline_for_all_of_them(server: ReplyServer) -> None:
    server.drip, server.drips_all = 0.5, True
    with pytest.raises(Undecided, match="no reply in time"):
        judge(server, seconds=0.8)("q", "c", "a")
    assert server.dripped < 20, "of more than a hundred bytes, each of them in time"
    server.drip = 0.0


def test_a_judge_that_asks_for_more_time_than_there_is_is_not_waited_for(server: ReplyServer) -> None:
    server.replies, server.headers = [(429, "later")], {"Retry-After": "3600"}
    start = time.monotonic()
    with pytest.raises(Undecided, match="429"):
        judge(server, seconds=5.0)("q", "c", "a")
    assert time.monotonic() - start < 5.0


def test_nobody_at_the_address_is_undecided(server: ReplyServer) -> None:
    nobody = Judge(JudgeConfig(address="http://127.0.0.1:9/v1", model="m", wait=0.0))
    with pytest.raises(Undecided, match=r"127\.0\.0\.1:9.*refused"):
        nobody("q", "c", "a")


def test_it_can_be_one_of_several_rewards_and_is_asked_where_those_before_it_decided(server: ReplyServer) -> None:
    server.replies = [(200, "Score: 5"), (200, "no score")]
    functions = [{"function": "last_number"}, {"function": "judge", "name": "tone", "weight": 0.5}]
    judged = {"address": f"{server.address}/v1", "model": "m", "tries": 1}
    items = [ScoreItem("q", text, gold) for text, gold in (("one 1", "1"), ("one 2", "1"), ("one 3", "no number"))]
    first, *others = scored({"functions": functions, "judge": judged}, *items)
    assert first == Verdict(Outcome.RIGHT, 1.25, rewards={"last_number": 1.0, "tone": 0.5})
    assert [(verdict.outcome, verdict.reward, verdict.reason.partition(":")[0]) for verdict in others] == [
        (Outcome.UNDECIDED, None, "tone"),
        (Outcome.UNDECIDED, None, "last_number"),
    ]
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs judge.address and judge.model"),
        ({"judge": {"address": "http://h/v1"}}, "needs judge.address and judge.model"),
        ({"judge": {"address": "h/v1", "model": "m"}}, "does not begin with http"),
        ({"judge": {"address": "http://h", "model": "m", "prompt": "Grade!"}}, "does not contain {completion}"),
        ({"judge": {"address": "http://h", "model": "m", "seconds": 60}}, r"must be more than judge.seconds"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardsConfig.model_validate({"function": "judge"} | settings)
