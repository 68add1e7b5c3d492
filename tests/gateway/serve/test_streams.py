"""Promises of a stream whose tokens are sent in the step that samples them: however its client lags, every token is
sent once and in order; events are those of the dialect to the byte; a fault of one stream ends no other.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.engine import NewToken
from stretto.core.records import GenerateRequest, Sampling
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto_gateway.dialects.chat import ChatDialect
from stretto_gateway.dialects.completions import CompletionsDialect
from stretto_gateway.dialects.openai import ChoiceDialect
from stretto_gateway.dialects.token_ids import TokenIdsDialect
from stretto_gateway.serve.completing import Completing
from stretto_gateway.serve.remote import RemoteEngine
from tests.engine.byte_policy import NAME, generated
from tests.gateway.serve.serving import engine_of, running_engine, served_model

DIALECTS: list[ChoiceDialect] = [CompletionsDialect(), ChatDialect(strict=True), TokenIdsDialect()]
BODIES: list[dict[str, Any]] = [
    {"model": NAME, "prompt": "ab", "stream_options": {"include_usage": True}},
    {"model": NAME, "messages": [{"role": "user", "content": "ab"}]},
    {"token_ids": [97, 98], "sampling_params": {"logprobs": 1}},
]


class Lagging:
    """A client's connection that takes events at once, or after some turns, as drawn."""

    def __init__(self, takes: Iterator[bool], turns: Iterator[int]) -> None:
        self._takes, self._turns = takes, turns
        self.sent = b""

    def write_now(self, events: Callable[[], bytes]) -> bool:
        """See `stretto_gateway.app.ChatExchange`."""
        if not next(self._takes):
            return False
        self.sent += events()
        return True

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """See `stretto_gateway.app.ChatExchange`."""
        for _ in range(next(self._turns)):
            await asyncio.sleep(0)
        self.sent += events


def requests_of(dialect: ChoiceDialect, body: dict[str, Any]) -> Any:
    return dialect.parse(json.dumps(body | {"stream": True}).encode())


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_folder)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def remote(byte_folder: Path, runner: asyncio.Runner) -> Iterator[RemoteEngine]:
    """One for all examples, which lives while the runner runs: to begin and to end takes longer than an example."""
    running = running_engine(engine_of(byte_folder))
    yield runner.run(running.__aenter__())
    runner.run(running.__aexit__(None, None, None))


def cycled(values: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from values


@pytest.mark.parametrize("kind", range(3), ids=["completions", "chat", "token ids"])
@settings(max_examples=25)
@given(takes=st.lists(st.booleans(), min_size=1, max_size=7), turns=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_every_token_is_sent_once_and_in_order_however_the_client_lags(
    kind: int, tokenizer: Tokenizer, remote: RemoteEngine, runner: asyncio.Runner, takes: list[bool], turns: list[int]
) -> None:
    sampling = Sampling(max_tokens=12)
    asked = [GenerateRequest(id=f"{n}", prompt_token_ids=(97, 98), seeds=(n,), sampling=sampling) for n in range(2)]
    request = requests_of(DIALECTS[kind], BODIES[kind])

    async def sent(call: Lagging) -> tuple[bytes, int]:
        completing = Completing(request, asked, "name", served_model(tokenizer), began=0.0, created=1)
        async with remote.streaming(asked, completing.take) as stream:
            await completing.write(DIALECTS[kind], call, stream)  # type: ignore[arg-type]
        return call.sent, completing.sampled

    def by_choice(events: bytes) -> dict[int, list[Any]]:
        """The parts of each choice, in order; of a text, which may be cut anywhere, the whole."""
        found: dict[int, list[Any]] = {}
        for line in events.split(b"\n\n")[:-2]:
            for part in json.loads(line.removeprefix(b"data: "))["choices"]:
                found.setdefault(part["index"], []).append(part)
        return found

    def texts(events: bytes) -> dict[int, Any]:
        return {index: _joined(parts) for index, parts in by_choice(events).items()}

    lagging, tokens = runner.run(sent(Lagging(cycled(takes), cycled(turns))))
    steady, all_tokens = runner.run(sent(Lagging(cycled([False]), cycled([0]))))
    assert tokens == all_tokens == 24
    assert texts(lagging) == texts(steady)
    assert lagging.endswith(b"data: [DONE]\n\n")


def _joined(parts: Sequence[Any]) -> tuple[str, list[int], list[Any]]:
    text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
    ids = [token for part in parts for token in part.get("token_ids", [])]
    return text, ids, [part["finish_reason"] for part in parts if part["finish_reason"]]


@pytest.mark.parametrize("kind", range(3), ids=["completions", "chat", "token ids"])
@given(text=st.text(max_size=20), name=st.text(max_size=12) | st.sampled_from(['"choices":[]', "text", '"text"']))
def test_events_are_those_of_the_dialect_to_the_byte(kind: int, text: str, name: str) -> None:
    dialect, request = DIALECTS[kind], requests_of(DIALECTS[kind], BODIES[kind])
    head = dialect.head(request, "name", 1, name, whole=False)
    parts = [{"index": 3, "text": text}, {"index": 4, "delta": {}}]
    expected = b"".join(dialect.event(request, head, [part]) for part in parts)
    assert dialect.encoder(request, head)(parts) == expected
    part, encode = dialect.text_part(5, text), dialect.text_encoder(request, head, 5)
    assert (part is None) == (encode is None) == (kind == 2)
    if part is not None and encode is not None:
        assert encode(text) == dialect.event(request, head, [part])


async def test_a_fault_of_one_stream_ends_no_other(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)

    def broken(new: NewToken) -> bool:
        raise ZeroDivisionError(new.request)

    first, second = (GenerateRequest(id, (97,), (4,), Sampling(max_tokens=6)) for id in ("first", "second"))
    taken: list[int] = []

    def take(new: NewToken) -> bool:
        taken.append(new.token)
        return True

    async with (
        running_engine(engine) as remote,
        remote.streaming([first], broken) as failing,
        remote.streaming([second], take) as well,
    ):
        with pytest.raises(ZeroDivisionError, match="first"):
            await _all(failing)
        rest = await _all(well)
    assert taken
    assert (*taken, *rest) == generated(engine, second)[0].segment.token_ids


async def _all(stream: AsyncIterator[Any]) -> list[int]:
    return [token async for new in stream for progress in new for token in progress.segment.token_ids]
