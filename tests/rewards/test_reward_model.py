"""A reward model behind an address: a real server of vLLM's forms, whose replies are written down.

Promises: the reward is the one number of the reply; any other reply, and none in time, leaves the completion undecided
with the reason, never a zero; what cannot work is refused before a run.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.core.errors import RewardFunctionError
from stretto.core.records import Outcome
from stretto.launch.preflight.checks import check_reward_addresses
from stretto.rewards.config import RewardsConfig
from stretto.rewards.functions import Undecided
from stretto.rewards.service.wire import ScoreItem
from stretto_verify.models import RewardModel, RewardModelConfig
from tests.rewards.replying import Question, ReplyServer, serving
from tests.rewards.scoring import scored


def length(question: Question, said: str) -> bytes:
    """What is said; if nothing is, the length of the text as its number."""
    row = {"index": 0, "probs": [len(question.get("input", "")) / 10], "num_classes": 1}
    return (said or json.dumps({"object": "list", "data": [row]})).encode()


@pytest.fixture
def server() -> Iterator[ReplyServer]:
    with serving(length, (200, "")) as server:
        yield server


def model(server: ReplyServer, **settings: Any) -> RewardModel:
    return RewardModel(RewardModelConfig(address=server.address, model="rm", **{"wait": 0.01, **settings}))


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("settings", "data", "path", "question", "reward"),
    [
        ({}, {"probs": [0.25]}, "/classify", {"input": "qc"}, 0.25),
        ({"chat": True}, {"probs": [-1.5]}, "/classify", {"messages": CHAT, "add_generation_prompt": False}, -1.5),
        ({"form": "pooling"}, {"data": [3]}, "/pooling", {"input": "qc"}, 3.0),
        ({"form": "pooling"}, {"data": [[-0.5]]}, "/pooling", {"input": "qc"}, -0.5),
        ({"form": "score", "scale": 2.0}, {"score": 0.75}, "/score", {"text_1": "q", "text_2": "c"}, 1.5),
        ({"text": "Q: {prompt} A: {completion}"}, {"probs": [1]}, "/classify", {"input": "Q: q A: c"}, 1.0),
    ],
)
def test_the_reward_is_the_number_of_the_form(
    server: ReplyServer,
    settings: dict[str, Any],
    data: dict[str, Any],
    path: str,
    question: dict[str, Any],
    reward: float,
) -> None:
    server.replies = [(200, json.dumps({"object": "list", "data": [{"index": 0, **data}]}))]
    assert model(server, **settings)("q", "c", "gold") == reward
    assert server.seen == [(path, {"model": "rm", **question})]


def test_an_address_may_end_like_one_of_openai_and_texts_name_nothing_inside_of_each_other(server: ReplyServer) -> None:
    asked = RewardModel(RewardModelConfig(address=f"{server.address}/v1/", model="rm"))
    assert asked("{completion}", "{prompt}", "gold") == 2.0
    assert server.seen == [("/classify", {"model": "rm", "input": "{completion}{prompt}"})]


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (200, "no JSON", r"has no data\[0\]\.probs of one completion \(JSONDecodeError"),
        (200, "[]", r"has no data\[0\]\.probs of one completion \(TypeError"),
        (200, '{"data": []}', "of one completion"),
        (200, '{"data": [{"probs": [1]}, {"probs": [1]}]}', "of one completion"),
        (200, '{"data": [{"embedding": [1]}]}', "KeyError: 'probs'"),
        (200, '{"data": [{"probs": [0.2, 0.8]}]}', r"has 2 values in data\[0\]\.probs, and one number is needed"),
        (200, '{"data": [{"probs": []}]}', r"has 0 values"),
        (200, '{"data": [{"probs": [[1, 2, 3]]}]}', r"has 3 values"),
        (200, '{"data": [{"probs": ["0.5"]}]}', r"is '0\.5', and one number is needed"),
        (200, '{"data": [{"probs": [true]}]}', "is 'True', and one number is needed"),
        (200, '{"data": [{"probs": [null]}]}', "is 'None', and one number is needed"),
        (200, '{"data": [{"probs": [NaN]}]}', r"data\[0\]\.probs is nan, and a number between"),
        (200, '{"data": [{"probs": [-Infinity]}]}', "is -inf"),
        (200, '{"data": [{"probs": [1e7]}]}', "is 10000000.0"),
        (400, '{"error": "no such task"}', "the reward model at http.* refuses: 400 Bad Request: .*no such task"),
        (404, "", "refuses: 404"),
        (503, "", "503 Service Unavailable"),
    ],
)
def test_any_other_reply_leaves_a_text_undecided(server: ReplyServer, status: int, said: str, reason: str) -> None:
    server.replies = [(status, said)]
    with pytest.raises(Undecided, match=reason):
        model(server)("q", "c", "gold")
    assert len(server.seen) == (3 if status >= 500 else 1)


def test_a_busy_server_is_asked_again_and_the_workers_of_a_run_ask_it(server: ReplyServer) -> None:
    server.replies = [(503, ""), (200, '{"data": [{"probs": [0.8]}]}'), (200, '{"data": [{"probs": [0.2]}]}')]
    server.replies += [(200, '{"data": [{"probs": [NaN]}]}')]
    section = {"address": server.address, "model": "rm", "wait": 0.01}
    items = [ScoreItem(prompt="q", completion=c, answer="a") for c in "xyz"]
    verdicts = scored({"function": "reward_model", "reward_model": section}, *items)
    assert [(verdict.outcome, verdict.reward) for verdict in verdicts] == [
        (Outcome.RIGHT, 0.8),
        (Outcome.WRONG, 0.2),
        (Outcome.UNDECIDED, None),
    ]


def test_an_address_that_nothing_answers_at_is_named_before_a_run(server: ReplyServer) -> None:
    functions = [{"function": "reward_model"}, {"function": "judge"}]
    dead = "http://127.0.0.1:9/v1"
    sections = {"functions": functions, "reward_model": {"address": server.address, "model": "rm"}}
    config = RewardsConfig.model_validate({**sections, "judge": {"address": dead, "model": "m"}})
    with pytest.raises(RewardFunctionError) as refused:
        check_reward_addresses(config)
    remedy = "start the server, or give the address of one that runs"
    assert str(refused.value) == f"rewards.judge.address: '{dead}': nothing answers: Connection refused; {remedy}"
    check_reward_addresses(RewardsConfig.model_validate(sections | {"functions": functions[:1]}))
    check_reward_addresses(RewardsConfig())


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "needs reward_model.address and reward_model.model"),
        ({"address": "h:1", "model": "m"}, "does not begin with http"),
        ({"address": "http://h", "model": "m", "text": "{prompt}"}, "does not contain {completion}"),
        ({"address": "http://h", "model": "m", "form": "score", "chat": True}, "choose one"),
        ({"address": "http://h", "model": "m", "form": "rank"}, "'classify', 'pooling' or 'score'"),
        ({"address": "http://h", "model": "m", "seconds": 60}, r"must be more than reward_model.seconds"),
    ],
)
def test_settings_that_cannot_work_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardsConfig.model_validate({"function": "reward_model", "reward_model": section})
