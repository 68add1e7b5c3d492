"""Promises: a ticket brings its prompt and its seeds, is sampled by one call at a time, and can be sampled again as
soon as that call was cancelled."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import pytest

import stretto
from stretto_verbs.background import background
from tests.verbs.test_engine import PROMPT, admitted


@pytest.fixture(scope="module")
def engine(folder: Path) -> stretto.Engine:
    return stretto.Engine.load(folder, cache_gib=0.05)


def test_a_ticket_is_sampled_again_as_soon_as_it_was_cancelled(folder: Path, tmp_path: Path, warm: None) -> None:
    asked: dict[str, Any] = {"max_tokens": 90, "stop_token_ids": ()}
    with (
        stretto.Ledger(tmp_path) as ledger,
        stretto.Engine.load(folder, apart=True, cache_gib=0.05, ledger=ledger) as engine,
    ):
        ticket = admitted(stretto.Scheduler([PROMPT], batch_size=1, group_size=2, ledger=ledger))
        request = cast(Any, engine)._asked(ticket, 1, None, None, None, asked)

        async def cancelled() -> None:
            """In the thread of the engine, whose process has no time to notice."""
            for milliseconds in range(60):
                sampling = asyncio.create_task(cast(Any, engine)._sampled(request, None))
                await asyncio.sleep(milliseconds % 15 / 1000)
                sampling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sampling

        background().call(cancelled())
        again, alone = engine.sample(ticket, **asked), engine.sample(PROMPT, seeds=ticket.seeds, **asked)
        assert [one.token_ids for one in again] == [one.token_ids for one in alone]


def test_a_ticket_brings_its_prompt_and_its_seeds(engine: stretto.Engine, folder: Path, tmp_path: Path) -> None:
    ticket = admitted(stretto.Scheduler([PROMPT], batch_size=1, group_size=2))
    assert engine.sample(ticket, max_tokens=6) == engine.sample(PROMPT, seeds=ticket.seeds, max_tokens=6)
    for beside in ({"n": 2}, {"seed": 1}, {"seeds": [1]}):
        with pytest.raises(stretto.RefusedRequest, match="a ticket, beside n, seed or seeds; leave these out"):
            engine.sample(ticket, **beside)
    with stretto.Ledger(tmp_path) as ledger, stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger) as keeping:
        scheduler = stretto.Scheduler([PROMPT], batch_size=1, group_size=2, ledger=ledger)
        kept = admitted(scheduler)
        first = keeping.submit(kept, max_tokens=150, stop_token_ids=())
        with pytest.raises(stretto.RefusedRequest, match=r"group 0\.0\.0 is being sampled already; one call"):
            keeping.sample(kept)
        scheduler.lose(kept, "nobody waits for it")
        assert len(first.result(60)) == 2  # its tokens are on no record
        assert keeping.sample(ticket, max_tokens=6) == engine.sample(ticket, max_tokens=6)  # of another ledger
        cast(Any, background()).call(cast(Any, keeping._tickets)._kept())
        assert ledger.balance().failed == 2
