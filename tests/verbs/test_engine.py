"""`stretto.Engine` with weights that change.

- New weights interrupt a completion: its tokens name the version that sampled them, and have its log-probabilities.
- Under adapters that share a model an engine says what one with the merged weights says.
- Scores are the model's own log-probabilities; seeds, several completions, stop tokens and top log-probabilities.
- An engine in a process of its own says the same as one in this process; dropped, it keeps nobody waiting, and ends.
- A ticket's tokens are on record: after a kill its completions go on after them, and are those of a loop without one.
  So are the turns of its conversations.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stretto
from stretto.core.errors import EngineLost, TornPublication
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy, save_policy
from stretto_verbs.background import background
from tests.asynchronous import until
from tests.launch.running import wait_until
from tests.tiny_policy import TINY
from tests.verbs.plain import plain_model

PROMPT = (5, 12, 8)
_TURNS, _LENGTH, _LONG = 3, 20, 90


@pytest.fixture(scope="module")
def engine(folder: Path) -> stretto.Engine:
    return stretto.Engine.load(folder, cache_gib=0.05)


@pytest.fixture(scope="module")
def after(folder: Path, data: list[stretto.Datum]) -> stretto.Trainer:
    """A trainer after some steps."""
    return trained(folder, data)


def trained(folder: Path, data: list[stretto.Datum], **settings: Any) -> stretto.Trainer:
    trainer = stretto.Trainer(folder, learning_rate=3e-2, **settings)
    for _ in range(3):
        trainer.forward_backward(data)
        trainer.optim_step()
    return trainer


def scored(trainer: stretto.Trainer, tokens: tuple[int, ...]) -> tuple[float, ...]:
    return trainer.forward([stretto.Datum(tokens[:-1], tokens[1:])]).logprobs[0]


def test_new_weights_interrupt_completions_each_token_is_of_its_version(folder: Path, after: stretto.Trainer) -> None:
    engine, before = stretto.Engine.load(folder, cache_gib=0.05), stretto.Trainer(folder)
    future = engine.submit(PROMPT, n=8, max_tokens=90, seed=1, stop_token_ids=())

    async def change() -> None:
        """In the thread of the engine: between two steps, and in mid-completion whatever else the machine does."""
        await until(lambda: generated(engine) >= 80, 0)
        await cast(Any, engine._source).update(after.weights())

    background().call(change())
    assert engine.version == 1
    mixed = [one for one in future.result(60) if set(one.versions) == {0, 1}]
    assert mixed, "the weights came before the first token, or after the last"
    for one in mixed[:2]:
        assert one.interrupted == 1
        assert list(one.versions) == sorted(one.versions)
        expected = [scored(trainer, (*PROMPT, *one.token_ids))[len(PROMPT) - 1 :] for trainer in (before, after)]
        assert list(one.logprobs) == pytest.approx(
            [expected[version][at] for at, version in enumerate(one.versions)], abs=1e-4
        )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.usefixtures("warm")
def test_adapters_come_to_their_own_base_in_any_dtype_and_to_no_other(
    folder: Path, data: list[stretto.Datum], tmp_path: Path, apart: bool
) -> None:
    build_policy(TINY, tmp_path / "other", seed=2)  # of the same shapes and tokenizer
    save_policy(load_policy(folder), folder, tmp_path / "half", dtype="bfloat16")
    trainer = stretto.Trainer(folder, lora=4)
    trainer.forward_backward(data)
    trainer.optim_step()
    with stretto.Engine.load(tmp_path / "half", apart=apart, cache_gib=0.02) as engine:
        assert engine.update(trainer.weights()) == 1
    with stretto.Engine.load(tmp_path / "other", apart=apart, cache_gib=0.02) as engine:
        with pytest.raises(stretto.DataError, match=r"trained beside other weights than those of .*other, by model.*"):
            engine.update(trainer.weights())
        assert engine.version == 0
        engine.update(replace(stretto.Trainer(folder).weights(), version=1))  # a whole policy has its base in it
        assert engine.update(replace(trainer.weights(), version=2)) == 2
        assert engine.score([(*PROMPT, 3, 4)])[0] == pytest.approx(scored(trainer, (*PROMPT, 3, 4)), abs=1e-4)


def test_engines_apart_of_no_model_leave_nothing_open(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(stretto.ModelFolderError):
        stretto.Engine.load(tmp_path / "model", apart=True)
    assert os.listdir("/proc/self/fd") == before


def test_no_weights_come_into_a_shared_model(folder: Path, data: list[stretto.Datum]) -> None:
    shared = stretto.SharedModel(folder)
    trainers = [stretto.Trainer(shared, lora=4, learning_rate=3e-2), stretto.Trainer(folder, learning_rate=3e-2)]
    other, engine = stretto.Trainer(shared, lora=2), stretto.Engine.load(shared, cache_gib=0.02)
    before = other.forward(data).logprobs
    for trainer in trainers:
        trainer.forward_backward(data)
        trainer.optim_step()
        with pytest.raises(stretto.DataError, match="shared model, which never change; load it with the trainer's lo"):
            engine.update(trainer.weights())
    assert engine.version == 0
    assert other.forward(data).logprobs == before
    assert engine.score([(*PROMPT, 3, 4)])[0] == pytest.approx(scored(other, (*PROMPT, 3, 4)), abs=1e-5)


def test_adapters_beside_a_shared_model_are_the_merged_policy(folder: Path, data: list[stretto.Datum]) -> None:
    shared = stretto.SharedModel(folder)
    trainers = [stretto.Trainer(shared, lora=rank, learning_rate=3e-2) for rank in (2, 4)]
    engines = [stretto.Engine.load(shared, lora=rank, cache_gib=0.02) for rank in (2, 4)]
    for trainer in trainers:
        trainer.forward_backward(data)
        trainer.optim_step()
        trainers[0].forward_backward(data)
        trainers[0].optim_step()
    found = []
    for trainer, engine in zip(trainers, engines, strict=True):
        engine.update(trainer.weights())
        merged = stretto.Engine.load(folder, cache_gib=0.02)
        merged.update(trainer.weights())
        own, theirs = engine.score([(*PROMPT, 3, 4)]), merged.score([(*PROMPT, 3, 4)])
        assert own[0] == pytest.approx(theirs[0], abs=1e-5)
        assert own[0] == pytest.approx(scored(trainer, (*PROMPT, 3, 4)), abs=1e-5)
        assert [one.token_ids for one in engine.sample(PROMPT, n=3, seed=1, max_tokens=8)] == [
            one.token_ids for one in merged.sample(PROMPT, n=3, seed=1, max_tokens=8)
        ]
        found.append(own[0])
    assert found[0] != found[1]


def test_scores_are_the_log_probabilities_of_the_model(engine: stretto.Engine, folder: Path) -> None:
    text = tuple(2 + 7 * at % 20 for at in range(150))
    logits = plain_model(folder)(torch.tensor([text])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    found = engine.score([text, (5,), "3+4="])
    assert found[0] == pytest.approx(expected, abs=1e-4)
    assert found[1] == ()
    assert len(found[2]) == 3


def test_completions_of_one_prompt(engine: stretto.Engine) -> None:
    several = engine.sample(PROMPT, n=3, seed=4, max_tokens=6)
    assert len({one.token_ids for one in several}) > 1
    assert several == engine.sample(PROMPT, n=3, seed=4, max_tokens=6)
    first = engine.sample(PROMPT, seeds=[9], max_tokens=6, stop_token_ids=())[0]
    assert engine.sample(PROMPT, seeds=[8, 9], max_tokens=6, stop_token_ids=())[1].token_ids == first.token_ids
    stopped = engine.sample(PROMPT, seeds=[9], max_tokens=6, stop_token_ids=[first.token_ids[2]])[0]
    assert stopped.token_ids == first.token_ids[: first.token_ids.index(first.token_ids[2]) + 1]
    likeliest = engine.sample(PROMPT, seeds=[9], max_tokens=2, top_logprobs=3)[0].top_logprobs
    assert [len(one) for one in likeliest] == [3, 3]


def test_an_engine_in_a_process_of_its_own_says_the_same(
    engine: stretto.Engine, folder: Path, data: list[stretto.Datum], warm: None
) -> None:
    apart = stretto.Engine.load(folder, apart=True, cache_gib=0.05)
    told: dict[str, Any] = {"n": 3, "seed": 1, "max_tokens": 8}
    assert [one.token_ids for one in apart.sample(PROMPT, **told)] == [
        one.token_ids for one in engine.sample(PROMPT, **told)
    ]
    trainer = trained(folder, data, lora=4)
    assert apart.update(trainer.weights()) == apart.version == 1
    assert apart.score([(*PROMPT, 3, 4)])[0] == pytest.approx(scored(trainer, (*PROMPT, 3, 4)), abs=1e-4)
    began = time.monotonic()
    assert set(apart.sample(PROMPT, max_tokens=4)[0].versions) == {1}
    once = time.monotonic() - began

    # Its last reference is in the thread that all engines share, whose work goes on.
    place = str(cast(Any, apart._source)._folder)
    assert running(place)
    future = apart.submit(PROMPT, max_tokens=4)
    del apart
    began = time.monotonic()
    assert len(future.result(60)) == 1
    background().call(asyncio.sleep(0))
    assert time.monotonic() - began < once + 4
    wait_until(lambda: not Path(place).exists() and not running(place), "the end of the engine's process")


def test_adapters_behind_a_whole_policy_are_added_to_it_also_in_an_engine_that_replaces_another(
    folder: Path, after: stretto.Trainer, data: list[stretto.Datum], warm: None
) -> None:
    whole, adapters = after.weights(), trained(folder, data, lora=4).weights()
    adapters = replace(adapters, version=2, base={})
    with (
        stretto.Engine.load(folder, cache_gib=0.05) as here,
        stretto.Engine.load(folder, apart=True, cache_gib=0.05) as apart,
    ):
        for engine in (here, apart):
            engine.update(whole)
            engine.update(adapters)
        wanted = pytest.approx(here.score([PROMPT])[0], abs=1e-4)
        assert apart.score([PROMPT])[0] == wanted
        place = str(cast(Any, apart._source)._folder)
        (first,) = running(place)
        os.kill(int(first.name), signal.SIGKILL)
        wait_until(lambda: running(place) not in ([], [first]), "another process")
        assert apart.score([PROMPT])[0] == wanted
        assert apart.update(adapters) == 2  # the same again
        apart.update(replace(whole, version=3))
        apart.update(replace(adapters, version=4))
        assert apart.score([PROMPT])[0] == wanted


@pytest.mark.parametrize("apart", [False, True], ids=["here", "apart"])
def test_weights_that_are_older_or_of_another_model_are_refused_and_the_engine_goes_on(
    folder: Path, after: stretto.Trainer, data: list[stretto.Datum], warm: None, apart: bool
) -> None:
    with stretto.Engine.load(folder, apart=apart, cache_gib=0.05) as engine:
        weights = after.weights()
        other = {name: torch.zeros(2, 2) for name in weights.tensors}
        with pytest.raises(TornPublication, match="version 5 is not of this model"):
            engine.update(replace(weights, version=5, tensors=other))
        engine.update(weights)
        assert engine.update(weights) == 1  # the same again
        told = pytest.raises(stretto.RefusedRequest, match="version: 1, which is in use with other weights; a version")
        with told if apart else contextlib.nullcontext():  # an engine apart would not load them
            engine.update(trained(folder, data[:1]).weights())
        with pytest.raises(stretto.RefusedRequest, match="at least 1, the version in use"):
            engine.update(stretto.Trainer(folder).weights())
        assert set(engine.sample(PROMPT, max_tokens=4)[0].versions) == {engine.version} == {1}


def test_an_engine_apart_takes_weights_of_version_0_only_if_they_are_those_of_its_folder(
    folder: Path, tmp_path: Path, warm: None
) -> None:
    """It would not load them, and would have them only after its process is replaced."""
    build_policy(TINY, tmp_path / "other", seed=2)
    with stretto.Engine.load(folder, apart=True, cache_gib=0.05) as engine:
        before = engine.score([PROMPT])
        for same in (stretto.Trainer(folder), stretto.Trainer(folder, lora=4)):
            assert engine.update(same.weights()) == 0
        with pytest.raises(stretto.RefusedRequest, match="version: 0, which is in use with other weights; a version"):
            engine.update(stretto.Trainer(tmp_path / "other").weights())
        assert engine.score([PROMPT]) == before


def test_an_update_that_failed_is_waited_for_when_it_comes_again(
    folder: Path, after: stretto.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stretto.Engine.load(folder, apart=True, cache_gib=0.05) as engine:
        pool = cast(Any, engine._source)._pool
        reach, asked = pool.reach, list[int]()

        async def failing(version: int) -> None:
            asked.append(version)
            if len(asked) == 1:
                raise EngineLost("engine-0", "does not reply")
            await reach(version)

        monkeypatch.setattr(pool, "reach", failing)
        with pytest.raises(EngineLost):
            engine.update(after.weights())
        assert engine.update(after.weights()) == 1
        assert asked == [1, 1]


def running(mark: str) -> list[Path]:
    """Processes with this text among their arguments."""
    found = list[Path]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "cmdline").read_text(errors="replace"):
                found.append(process)
    return found


@given(tokens=st.integers(1, 2 * _LONG), changed=st.integers(0, 2 * _LONG), members=st.integers(1, 2))
@settings(max_examples=4)
def test_after_a_kill_a_ticket_goes_on_after_the_tokens_on_record(
    folder: Path, after: stretto.Trainer, tokens: int, changed: int, members: int
) -> None:
    """`tokens`: sampled when the loop is killed; `changed`: when the engine got new weights, if that was before."""
    asked: dict[str, Any] = {"max_tokens": _LONG, "stop_token_ids": ()}
    bounds: dict[str, Any] = {"batch_size": 1, "group_size": members}
    weights, whole_length = after.weights(), _LONG * members
    with tempfile.TemporaryDirectory() as place:
        left = Path(place) / "left"
        with stretto.Ledger(Path(place) / "run") as ledger:
            engine = stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger)
            ticket = admitted(stretto.Scheduler([PROMPT], ledger=ledger, **bounds))
            future = engine.submit(ticket, **asked)
            sampled = 0  # by the time of the kill

            async def live() -> None:
                nonlocal sampled
                for at in sorted({changed, tokens}):
                    while generated(engine) < at and not future.done():
                        await asyncio.sleep(0)
                    if at == changed:
                        await cast(Any, engine._source).update(weights)
                    if at == tokens:
                        while generated(engine) >= whole_length and not future.done():
                            await asyncio.sleep(0)  # what has ended comes to the journal a turn later
                        await cast(Any, engine._tickets)._kept()
                        sampled = generated(engine)
                        shutil.copytree(ledger.folder, left)  # what a kill leaves

            background().call(live())
            whole = future.result(60)
            engine.close()
        with stretto.Ledger(left) as ledger:
            [group] = ledger.unfinished()
            known = [group.members[member].segments[0] for member in range(members)]
            assert 0 < sum(one.length for one in known) <= sampled
            scheduler = stretto.Scheduler([PROMPT], ledger=ledger, version=1, **bounds)
            with stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger) as engine:
                engine.update(weights)
                ticket = admitted(scheduler)
                found = engine.sample(ticket, **asked)
                new = generated(engine)
                assert engine.sample(ticket, **asked) == found  # from the record
            assert new == sum(len(one.token_ids) for one in whole) - sum(one.length for one in known)
            for one, before, uninterrupted in zip(found, known, whole, strict=True):
                assert one.token_ids[: before.length] == before.token_ids
                assert one.logprobs[: before.length] == before.behavior_logprobs
                assert one.versions[: before.length] == before.versions
                assert list(one.versions) == sorted(one.versions)
                if changed <= tokens:  # the same weights at the same places
                    assert one.token_ids == uninterrupted.token_ids
            scheduler.finish(ticket, found, [1.0] * members)
            assert scheduler.take() is not None
            assert ledger.balance().trained == members


def converse(engine: stretto.Engine, ticket: stretto.Ticket, member: int) -> list[Any]:
    """Three turns, and between them what a tool says."""
    turns, history = list[Any](), ticket.prompt.token_ids
    for at in range(_TURNS):
        [said] = engine.sample(history, turn=(ticket, member), max_tokens=_LENGTH, stop_token_ids=())
        given = (2 + at, 7, 8)
        turns += [said, given] if at < _TURNS - 1 else [said]
        history = (*history, *said.token_ids, *given)
    return turns


def conversations(engine: stretto.Engine, ticket: stretto.Ticket) -> list[list[Any]]:
    """Those of all members, side by side."""
    with ThreadPoolExecutor(len(ticket.seeds)) as threads:
        return list(threads.map(partial(converse, engine, ticket), ticket.members))


def generated(engine: stretto.Engine) -> int:
    return int(cast(Any, engine._source)._generation.engine.health().generated)


@given(tokens=st.integers(1, 2 * _TURNS * _LENGTH))
@example(tokens=50)
@example(tokens=90)
@settings(max_examples=1)
def test_after_a_kill_a_conversation_goes_on_after_the_turns_on_record(folder: Path, tokens: int) -> None:
    """`tokens`: sampled when the loop is killed."""
    bounds: dict[str, Any] = {"batch_size": 1, "group_size": 2}
    with tempfile.TemporaryDirectory() as place:
        left = Path(place) / "left"
        with (
            stretto.Ledger(Path(place) / "run") as ledger,
            stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger) as engine,
            ThreadPoolExecutor(1) as loop,
        ):
            ticket = admitted(stretto.Scheduler([PROMPT], ledger=ledger, **bounds))
            talk = loop.submit(conversations, engine, ticket)

            async def kill() -> None:
                await until(lambda: generated(engine) >= tokens or talk.done(), 0)
                await cast(Any, engine._tickets)._kept()
                shutil.copytree(ledger.folder, left)

            background().call(kill())
            whole = talk.result(120)
        with stretto.Ledger(left) as ledger, stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger) as engine:
            [group] = ledger.unfinished()
            records = [group.members[member].segments if member in group.members else () for member in (0, 1)]
            scheduler = stretto.Scheduler([PROMPT], ledger=ledger, **bounds)
            ticket = admitted(scheduler)
            found = conversations(engine, ticket)
            known = sum(one.length for record in records for one in record if one.sampled)
            assert known >= max(1, tokens - 2 * _LENGTH)
            assert generated(engine) == 2 * _TURNS * _LENGTH - known
            for record, turns, uninterrupted in zip(records, found, whole, strict=True):
                for segment, turn in zip(record, turns, strict=False):
                    tokens_of_turn = turn.token_ids if isinstance(turn, stretto.TextCompletion) else turn
                    assert tokens_of_turn[: segment.length] == segment.token_ids
                assert [turn.token_ids for turn in turns[::2]] == [turn.token_ids for turn in uninterrupted[::2]]
            with pytest.raises(
                stretto.RefusedRequest, match=r"group 0\.0\.0 is sampled turn by turn; give the history"
            ):
                engine.sample(ticket)
            scheduler.finish(ticket, found, [1.0, 0.0])
            batch = scheduler.take()
            assert batch is not None
            first, _ = batch.groups[0].trajectories
            assert [segment.sampled for segment in first.segments] == [True, False] * (_TURNS - 1) + [True]


def test_a_turn_brings_its_seed_with_or_without_a_record(engine: stretto.Engine, folder: Path, tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger, stretto.Engine.load(folder, cache_gib=0.05, ledger=ledger) as keeping:
        scheduler = stretto.Scheduler([PROMPT], batch_size=2, group_size=2, max_staleness=0, ledger=ledger)
        ticket, whole = admitted(scheduler), admitted(scheduler)
        told = [turn.token_ids for turn in converse(keeping, ticket, 1)[::2]]
        assert told == [turn.token_ids for turn in converse(engine, ticket, 1)[::2]]
        again = [
            [one.sample(PROMPT, turn=(ticket, 0), max_tokens=_LENGTH, stop_token_ids=())[0].token_ids for _ in range(3)]
            for one in (keeping, engine)
        ]
        assert again[0] == again[1]
        assert len({*again[0]}) == 3
        for beside in ({"n": 2}, {"seed": 1}, {"seeds": [1]}, {"top_logprobs": 1}):
            with pytest.raises(stretto.RefusedRequest, match="turn: beside a ticket, n, seed, seeds or top_logprobs"):
                keeping.sample(PROMPT, turn=(ticket, 0), **beside)
        with pytest.raises(stretto.DataError, match=r"sample: turn: .*; give a ticket and the number of one of its"):
            keeping.sample(PROMPT, turn=(ticket, 2))
        keeping.sample(whole, max_tokens=2)
        with pytest.raises(
            stretto.RefusedRequest, match=r"turn: group \S+ is sampled whole; give `turn` with the first"
        ):
            keeping.sample(PROMPT, turn=(whole, 0))
        scheduler.lose(ticket, "nobody waits for it")
        assert told == [turn.token_ids for turn in converse(keeping, ticket, 1)[::2]]  # on no record


def admitted(scheduler: stretto.Scheduler) -> stretto.Ticket:
    ticket = scheduler.admit()
    assert ticket is not None
    return ticket
