"""Mistakes in loops of one's own are told with their place, what was found, and what to do."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import stretto
from stretto.core.records import Prompt
from stretto.launch.recipe.recipe import validate
from stretto_verbs.background import background
from tests.engine.byte_policy import NAME, build_byte_policy
from tests.verbs.test_scheduler import said

ROOT = Path(__file__).parents[2]
TOLD = stretto.Datum.of((2, 3), (4, 5))
SAMPLED = stretto.Datum.of((2, 3), (4, 5), logprobs=(-1.0, -1.0), advantages=1.0)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> stretto.Trainer:
    return stretto.Trainer(folder)


@pytest.mark.parametrize(
    ("data", "loss", "settings", "message"),
    [
        ([stretto.Datum.of((2, 3), (4, 99))], None, {},
         r"data\[0\].targets: token 99 is not in this model's vocabulary"),
        ([TOLD, stretto.Datum((2, 3), (3,))], None, {}, r"data\[1\].targets: 1 values; 2 are needed, one a token"),
        ([stretto.Datum((), ())], None, {}, r"data\[0\].token_ids: 0 tokens; 1 to 192, the context of the model"),
        ([TOLD], "ppo", {}, r'data\[0\].logprobs: is missing; the loss "ppo" needs it: those that the engine gave'),
        ([stretto.Datum((2,), (3,), (float("nan"),))], None, {}, r"data\[0\].weights: nan; finite numbers are needed"),
        ([stretto.Datum((2,), (3,), (10**400,))], None, {}, r"data\[0\].weights: 10*; finite numbers are needed"),
        ([stretto.Datum((2,), (3,), (10**5000,))], None, {}, r"weights: an integer of thousands of digits; finite num"),
        ([stretto.Datum((10**5000,), (3,))], None, {}, r"token_ids: token an integer of thousands of digits is not in"),
        ([stretto.Datum((2, 3), ((3, 4), (5,)))], None, {},
         r"data\[0\].targets: \(5,\); a number for each position, or for each a row of K of them"),
        ([stretto.Datum((2,), ((3, 99),))], None, {}, r"data\[0\].targets: token 99 is not in this model's vocabulary"),
        ([stretto.Datum((2,), ((3, 4),), (1.0,))], None, {},
         r"data\[0\].weights: 1.0; a number for each position, or for each a row of K of them"),
        ([stretto.Datum((2,), ((3, 4),), logprobs=(-1.0,), advantages=(1.0,))], "ppo", {},
         r'data\[0\].targets: 2 for each position; the loss "ppo" knows one'),
        (None, None, {}, r"forward_backward: data: None; `Scheduler.take` has no batch yet: call it again later"),
        ([3], None, {}, r"data\[0\]: is a int; give a stretto.Datum"),
        ([SAMPLED], "dpo", {},
         r"forward_backward: loss: kind 'dpo' is unknown; .*; DPO learns from pairs, by `stretto"),
        ([SAMPLED], "sft", {},
         r"loss: kind 'sft' is unknown; .*; demonstrations are learnt by .* \"cross_entropy\" of"),
        ([SAMPLED], "poo", {}, r"forward_backward: loss: kind 'poo' is unknown.*did you mean 'ppo'\?"),
        ([SAMPLED], "ppo", {"agregation": "sum"}, r"forward_backward: agregation: unknown key; did you mean 'agg"),
        ([SAMPLED], "ppo", {"advantages": "group"}, r"advantages: is for a batch of groups, .*; leave it out"),
        ([replace(SAMPLED, logprobs=(0.5,) * 3)], "ppo", {}, r"data\[0\].logprobs: 0.5; give a logarithm of a prob"),
        ([replace(SAMPLED, staleness=(-1,) * 3)], "ppo", {}, r"data\[0\].staleness: -1; numbers of versions, 0 to 2,1"),
        ([replace(SAMPLED, staleness=(0, 0, 2**31))], "ppo", {}, r"staleness: 2147483648; numbers of versions, 0 to"),
        ([replace(TOLD, staleness=cast(Any, (1.5,) * 3))], None, {}, r"staleness: 1.5; numbers of versions, 0 to"),
        ([SAMPLED], "ppo", {"reference": {"into": "reward"}}, r'reference: is for a batch .*; .* give into = "loss"'),
        ([TOLD], lambda logprobs, data: logprobs[0].sum(), {"correction": "truncate"}, "correction: is no part of"),
        ([TOLD], lambda logprobs, data: logprobs[0].sum(), {"aggregation": "fixed_length"}, "aggregation: is no part"),
        ([TOLD], lambda logprobs: logprobs[0].sum(), {}, "<lambda>: too many positional arguments; it is called with"),
        ([TOLD], lambda logprobs, data: 3.0, {}, r"loss: <lambda> returned 3.0; one number is needed, a tensor"),
        ([TOLD], lambda logprobs, data: (logprobs[0].sum(), {}, 3), {}, "one number is needed"),
        ([TOLD], lambda logprobs, data: (logprobs[0].sum(), {"a": "x"}), {}, "'a' is no number"),
        ([TOLD], lambda logprobs, data: logprobs[0].sum().to(torch.complex64), {}, "one number is needed"),
        ([TOLD], lambda *_: torch.zeros((), requires_grad=True) * 2, {}, "computed from the log-probabilities"),
        ([TOLD], lambda logprobs, data: torch.zeros(()), {}, r"returned tensor\(0.\); .*from the log-probabilities"),
    ],
    ids=range(33),
)  # fmt: skip
def test_data_and_losses(
    trainer: stretto.Trainer, data: Any, loss: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(stretto.UserError, match=message) as told:
        trainer.forward_backward(data, loss, **settings)
    assert told.value.exit_code == 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda folder: stretto.Trainer(folder, learning_rat=1), "Trainer: learning_rat: unknown key; did you mean"),
        (lambda folder: stretto.Trainer(folder, lora=0), "Trainer: lora: rank: 0; input should be greater"),
        (lambda folder: stretto.Trainer(folder, beta1=10**5000), "beta1: an integer of thousands of digits; input"),
        (lambda folder: stretto.Trainer(folder, lora=cast(Any, "x")), "Trainer: lora: 'x'; give a rank, such as 16"),
        (lambda folder: stretto.Trainer(folder, sampling={"top": 1}), "Trainer: sampling.top: unknown key; allowed"),
        (lambda folder: stretto.Trainer(stretto.SharedModel(folder)), "lora: is missing: a shared model"),
        (lambda folder: stretto.Trainer(folder).optim_step(-1.0), "optim_step: learning_rate: -1.0; input should"),
        (
            lambda folder: stretto.Trainer(folder).optim_step(0.1, weight_decay=20),
            r"optim_step: .*weight_decay = 20 times learning_rate = 0\.1 is above 1: a step would take more than",
        ),
        (lambda folder: stretto.Trainer(folder).load("nowhere"), "nowhere: holds nothing that a trainer has saved"),
        (lambda folder: stretto.Trainer(folder).export("x", adapters_only=True), "this trainer has none"),
        (lambda folder: stretto.Trainer("nowhere"), "nowhere: no such folder"),
        (
            lambda folder: stretto.Engine.load(folder, slots=0),
            "^Engine.load: slots: 0; input should be greater than or",
        ),
        (lambda folder: stretto.Engine.load(folder, slot=3), "Engine.load: slot: unknown key; did you mean 'slots'?"),
        (lambda folder: stretto.Engine.load(folder, lora=3), "Engine.load: lora: is for a shared model; leave it out"),
        (lambda folder: stretto.Engine.load(folder, python="python3"), "python: is given, and the engine is stretto's"),
        (lambda folder: stretto.Engine.load(stretto.SharedModel(folder), apart=True), "model: a model in the"),
        (
            lambda folder: stretto.Engine.load(stretto.SharedModel(folder), dtype="bfloat16"),
            "Engine.load: dtype: 'bfloat16', and the shared model is in float32; leave it out",
        ),
        (
            lambda folder: stretto.Engine.load(stretto.SharedModel(folder, device="cpu"), device="cuda"),
            "Engine.load: device: 'cuda', and the shared model is on cpu; leave it out",
        ),
        (lambda folder: stretto.Engine.load(folder, deadlines={"strat": 3}), "deadlines: strat: unknown key; did you"),
        (lambda folder: stretto.Scheduler([]), "Scheduler: prompts: there is none; give one at least"),
        (lambda folder: stretto.Scheduler(["3+4="]), r"prompts\[0\]: is a text, and there is no tokenizer"),
        (lambda folder: stretto.Scheduler([(2,)], batchsize=3), "Scheduler: batchsize: unknown key; did you mean"),
        (lambda folder: stretto.Scheduler([{"question": "3"}]), r"prompts\[0\]: has no key 'prompt'; a row is"),
        (lambda folder: stretto.build_model("x", layer=1), "build_model: layer: unknown key; did you mean 'layers'?"),
        (lambda folder: stretto.Trainer(folder, warmup_steps=2), "Trainer: warmup_steps: would change nothing"),
        (lambda folder: stretto.Trainer.apart(folder, schedule="linear"), "Trainer.apart: schedule: would change"),
        (
            lambda folder: stretto.Scheduler([Prompt("1", (2,), "", ""), (3,), (4,)]),
            r"prompts\[1\]: has the id '1' of prompts\[0\]; give each",
        ),
    ],
    ids=range(27),
)
def test_settings(folder: Path, act: Callable[[Path], object], message: str) -> None:
    with pytest.raises(stretto.UserError, match=message):
        act(folder)


NO_BATCH: dict[str, dict[str, Any]] = {
    "min_group_size = 4 is more than rollout.group_size = 2": {"group_size": 2, "min_group_size": 4},
    "success_rate_min = 0.9 is more than rollout.success_rate_max": {"success_rate_min": 0.9, "success_rate_max": 0.1},
    "would filter every group": {"group_size": 1, "filter": "zero_variance"},
    "would filter every group; use": {"group_size": 1, "filter": ("zero_variance", "truncated_too:far")},
}


@pytest.mark.parametrize("message", NO_BATCH)
def test_settings_that_form_no_batch_are_refused_by_a_recipe_and_by_a_scheduler(
    message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "truncated_too.py").write_text("def far(group):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = NO_BATCH[message]
    tree = {
        "model": {"path": "m"},
        "task": {"kind": "arithmetic"},
        "trainer": {"minibatches": 1},
        "rollout": settings,
        "algorithm": {"advantages": "batch"},
    }
    with pytest.raises(stretto.RecipeError, match=message):
        validate(tree, "recipe.toml")
    with pytest.raises(stretto.RecipeError, match=f"Scheduler: .*{message.replace('rollout.', '')}"):
        stretto.Scheduler([(2, 3)], **settings)


def test_a_number_that_only_a_run_can_adapt_is_refused() -> None:
    with pytest.raises(stretto.RecipeError, match="Scheduler: max_in_flight: 'auto' follows what the engines of a run"):
        stretto.Scheduler([(2, 3)], max_in_flight="auto")


def test_a_version_from_the_future_and_one_from_before_the_admission(trainer: stretto.Trainer) -> None:
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=1)
    ticket = scheduler.admit()
    assert ticket is not None
    with pytest.raises(stretto.DataError, match="was sampled by version 3, and the scheduler is at version 0"):
        scheduler.finish(ticket, [said(3)], [1.0])
    ahead = stretto.Scheduler([(2, 3)], batch_size=1, group_size=1, version=3)
    ticket = ahead.admit()
    assert ticket is not None
    with pytest.raises(stretto.DataError, match="was sampled by version 2, and its group was admitted at version 3"):
        ahead.finish(ticket, [said(2)], [1.0])  # the engine has not loaded version 3
    ahead.finish(ticket, [said(3)], [1.0])
    with pytest.raises(stretto.DataError, match="batch: is for version 3, and this trainer is at version 0"):
        trainer.forward_backward(ahead.take())  # type: ignore[arg-type]
    with pytest.raises(stretto.DataError, match="advance: version 9, and the batch that was taken last"):
        ahead.advance(9)


def test_answers_that_do_not_fit_their_group() -> None:
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=2)
    ticket = scheduler.admit()
    assert ticket is not None
    with pytest.raises(stretto.DataError, match=r"group 0\.0\.0: answers: 1 are given; 2 are needed"):
        scheduler.finish(ticket, [said(0)], [1.0, 1.0])
    bare = stretto.TextCompletion("ab", (4, 4), (), "stop", ())
    with pytest.raises(stretto.DataError, match="2 tokens, 0 log-probabilities, 0 versions; give the"):
        scheduler.finish(ticket, [said(0), bare], [1.0, 1.0])
    with pytest.raises(stretto.DataError, match=r"rewards\[1\]: nan; a finite number, or None"):
        scheduler.finish(ticket, [said(0), said(0)], [1.0, float("nan")])
    with pytest.raises(stretto.DataError, match=r"rewards\[0\]: 1e\+300; it must lie between ±1e\+06; a finite number"):
        scheduler.finish(ticket, [said(0), said(0)], [1e300, 1.0])
    with pytest.raises(stretto.DataError, match=r"rewards\[0\]: 'right'; a number is needed"):
        scheduler.finish(ticket, [said(0), said(0)], ["right", 1.0])  # type: ignore[list-item]
    with pytest.raises(stretto.DataError, match=r"answers\[0\]\[1\]: is a text, '=4'; give its token ids"):
        scheduler.finish(ticket, [[said(0), "=4", said(0)], said(0)], [1.0, 1.0])  # type: ignore[list-item]
    for silent in ("3", [(2, 3)], []):
        with pytest.raises(stretto.DataError, match=r"answers\[1\]: .* holds no completion; give what the engine"):
            scheduler.finish(ticket, [said(0), silent], [1.0, 1.0])  # type: ignore[list-item]
    with pytest.raises(stretto.DataError, match=r"advance: no batch was taken; call it once after each batch"):
        scheduler.advance(1)
    scheduler.finish(ticket, [said(0), said(0)], [1.0, None])  # all of it can be said again


def test_what_a_grammar_shaped_is_plain_generation_and_never_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = build_byte_policy(tmp_path / NAME)
    scheduler = stretto.Scheduler([(70, 71)], batch_size=1, group_size=1)
    ticket = scheduler.admit()
    assert ticket is not None
    with stretto.Engine.load(folder, cache_gib=0.02) as engine:
        for asked in ({"prompt": ticket}, {"prompt": (70, 71), "turn": (ticket, 0)}):
            with pytest.raises(stretto.RefusedRequest, match="grammar: beside a ticket; leave it out: the trainer"):
                engine.sample(**asked, grammar='start: "yes" | "no"')
        [shaped] = engine.sample((70, 71), max_tokens=6, grammar='start: "yes" | "no"')
        plain = engine.sample(ticket, max_tokens=6)
    own = stretto.Trainer(folder).forward([stretto.Datum.of((70, 71), shaped.token_ids)]).logprobs[0][1:]
    assert max(abs(one - two) for one, two in zip(own, shaped.logprobs, strict=True)) > 1  # ratios far from 1
    with pytest.raises(stretto.DataError, match=r"answers\[0\]\[0\]: was sampled under a grammar, .* without one"):
        scheduler.finish(ticket, [shaped], [1.0])
    scheduler.finish(ticket, plain, [1.0])


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    scheduler = stretto.Scheduler([np.array([2, 3])], batch_size=1, group_size=4, max_staleness=0)
    ticket = scheduler.admit()
    assert ticket is not None
    turns: Any = [said(0), np.array([7, 8]), said(0)]
    rewards: Any = [np.float32(0.5), torch.tensor(1.0), np.bool_(True), 0]
    scheduler.finish(ticket, [turns, said(0), said(0), said(0)], rewards)
    batch = scheduler.take()
    assert batch is not None
    assert [one.reward for one in batch.groups[0].trajectories] == [0.5, 1.0, 1.0, 0.0]
    assert batch.groups[0].trajectories[0].token_ids == (4, 4, 7, 8, 4, 4)
    with pytest.raises(stretto.DataError, match=r"advance: metrics\['loss'\]: 'low'; a number is needed"):
        scheduler.advance(1, {"loss": "low"})  # type: ignore[dict-item]
    scheduler.advance(1, {"loss": np.float32(0.5)})  # type: ignore[dict-item]
    given: dict[str, Any] = {"logprobs": np.array([-1.0, -1.0]), "advantages": np.float32(1)}
    datum = stretto.Datum.of(np.array([2, 3]), np.array([4, 5]), **given)  # type: ignore[arg-type]
    assert (datum.token_ids, datum.advantages) == (SAMPLED.token_ids, SAMPLED.advantages)


def test_numbers_of_numpy_go_to_engines_apart_and_onto_disk_and_what_no_message_can_hold_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    numbers: Any = {"max_tokens": np.int64(3), "temperature": np.float32(1), "top_k": np.int32(9)}
    numbers |= {"top_p": np.float64(0.9), "stop_token_ids": [np.int64(1)], "seeds": [np.int64(5)]}
    with stretto.Engine.load(folder, apart=True, cache_gib=0.02) as engine:
        [completion] = engine.sample([2, 3], **numbers)
        for wrong in ({"seeds": [2**70]}, {"stop": "\ud83d"}, {"max_tokens": 2**70}):
            with pytest.raises(stretto.RefusedRequest, match="numbers of 64 bits, and whole letters"):
                engine.sample([2, 3], **wrong)
    assert 0 < len(completion.token_ids) <= 3
    settings: Any = {"batch_size": 1, "group_size": 2, "version": np.int64(0), "seed": np.int64(7)}
    with stretto.Ledger(tmp_path / "ledger") as ledger:
        scheduler = stretto.Scheduler([(2, 3)], ledger=ledger, **settings)
        ticket = scheduler.admit()
        assert ticket is not None
        scheduler.finish(ticket, [said(0), said(0)], [1.0, 0.0])
        assert scheduler.take() is not None
        scheduler.advance(np.int64(1))  # type: ignore[arg-type]
    with stretto.Ledger(tmp_path / "ledger") as ledger:
        assert stretto.Scheduler([(2, 3)], ledger=ledger, **settings | {"version": np.int64(1)}).version == 1


def test_a_closed_engine_and_weights_of_others(folder: Path, tmp_path: Path) -> None:
    engine = stretto.Engine.load(folder, cache_gib=0.02)
    other = stretto.Trainer(stretto.build_model(tmp_path / "other", alphabet="01", hidden_size=32, layers=1))
    with pytest.raises(stretto.DataError, match="these weights are of a model with another tokenizer"):
        engine.update(other.weights())
    with pytest.raises(stretto.DataError, match=r"sample: n: 0; give a whole number of at least 1"):
        engine.sample("3+4=", n=0)
    with pytest.raises(stretto.DataError, match=r"sample: temperature: 1000.*; give a number"):
        engine.sample("3+4=", temperature=10**400)
    with pytest.raises(stretto.RefusedRequest, match=r"texts\[0\]: token 99; 0 to 21, the vocabulary"):
        engine.score([(2, 99)])
    engine.close()
    for act in (lambda: engine.sample("3+4="), lambda: engine.score(["3+4="]), lambda: engine.update(other.weights())):
        with pytest.raises(stretto.StrettoError, match=r"is closed; load another one|another tokenizer"):
            act()


def test_an_engine_that_does_not_end_well_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    apart = stretto.Engine.load(folder, apart=True, cache_gib=0.02)
    os.close((source := cast(Any, apart._source))._held)  # as somebody's os.closerange does
    with pytest.raises(OSError, match="Bad file descriptor"):
        apart.close()
    apart.close()
    assert not source._folder.exists()
    monkeypatch.setattr("stretto_verbs.engine._END_SECONDS", 0.1)
    busy = stretto.Engine.load(folder, cache_gib=0.02)
    background().loop.call_soon_threadsafe(time.sleep, 0.5)
    busy.close()
    assert "an engine has not ended after 0.1 s; its end goes on in the background" in caplog.text


def test_two_writers_of_one_folder(folder: Path, tmp_path: Path) -> None:
    first, second = stretto.Trainer(folder, lora=2), stretto.Trainer(folder, lora=2)
    for _ in range(2):  # a closed one holds no folder, and takes it again
        first.save(tmp_path)
        with pytest.raises(stretto.RunFolderError, match=f"is in use by process {os.getpid()}"):
            second.save(tmp_path)
        first.close()
    second.save(tmp_path)
    with pytest.raises(stretto.StoreError, match="is of another model; these parameters differ"):
        stretto.Trainer(folder, lora=4).load(tmp_path)
    with stretto.Ledger(tmp_path), pytest.raises(stretto.RunFolderError, match="is in use by process"):
        stretto.Ledger(tmp_path)
    with stretto.Ledger(tmp_path) as ledger:
        assert stretto.Scheduler([(2, 3)], ledger=ledger, seed=1).admit() is not None
        with pytest.raises(stretto.RunFolderError, match="was begun with seed 1, not 2; give seed=1"):
            stretto.Scheduler([(2, 3)], ledger=ledger, seed=2)


def test_a_ledger_in_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(stretto.RunFolderError, match="holds a run, whose ledger is its own; give another folder"):
        stretto.Ledger(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_what_was_saved_is_what_the_folder_gives_back(folder: Path, tmp_path: Path) -> None:
    older, newer = stretto.Trainer(folder), stretto.Trainer(folder)
    told = [stretto.Datum.of((2, 3, 4), (5, 1))]
    for _ in range(3):
        newer.forward_backward(told)
        newer.optim_step()
        assert newer.save(tmp_path).is_dir()
    newer.close()
    with pytest.raises(stretto.RunFolderError, match="holds version 3, and this trainer is at version 0; load it"):
        older.save(tmp_path)
    assert older.load(tmp_path) == 3
    for path in (tmp_path / "checkpoints" / "step-000003").glob("*.safetensors"):
        path.write_bytes(b"broken")
    assert newer.load(tmp_path) == 2  # the newest that is whole; what is broken makes room
    older.close()
    assert newer.save(tmp_path).is_dir()
    assert older.load(tmp_path) == 2
