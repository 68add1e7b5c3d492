"""An argument of a wrong kind is told by its name, whatever it is; what is no model is never lost; tokens of another
tokenizer are refused by every part."""

import copy
import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

import stretto
from stretto.model.hf.folder import load_policy, save_policy
from tests.verbs.test_scheduler import said

#: None is allowed where an argument may be left out.
WRONG: tuple[Any, ...] = (object(), 2.5, -1, "", {"a": 1}, b"x", math.nan, True, [object()])


@pytest.fixture(scope="module")
def engine(folder: Path) -> stretto.Engine:
    return stretto.Engine.load(folder, cache_gib=0.02)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> stretto.Trainer:
    return stretto.Trainer(folder)


def scheduler(**settings: Any) -> tuple[stretto.Scheduler, stretto.Ticket]:
    made = stretto.Scheduler([(2, 3)], batch_size=1, group_size=1, **settings)
    ticket = made.admit()
    assert ticket is not None
    return made, ticket


def verbs(engine: stretto.Engine, trainer: stretto.Trainer, folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Each argument of a verb that has one right kind, as a function of what is given for it."""
    made, ticket = scheduler()
    data = [stretto.Datum.of((2, 3), (4, 5))]
    return {
        "Engine.load: model": stretto.Engine.load,
        "Engine.load: ledger": lambda given: stretto.Engine.load(folder, ledger=given),
        "Trainer: model": stretto.Trainer,
        "SharedModel: folder": stretto.SharedModel,
        "Ledger: folder": stretto.Ledger,
        "build_model: folder": lambda given: stretto.build_model(given, alphabet="01"),
        "build_model: seed": lambda given: stretto.build_model("x", seed=given, alphabet="01"),
        "sample: n": lambda given: engine.sample("3", given),
        "sample: seed": lambda given: engine.sample("3", seed=given),
        "sample: seeds": lambda given: engine.sample("3", seeds=given),
        "sample: turn": lambda given: engine.sample("3", turn=given),
        "max_tokens": lambda given: engine.sample("3", max_tokens=given),
        "temperature": lambda given: engine.sample("3", max_tokens=1, temperature=given),
        "top_k": lambda given: engine.sample("3", max_tokens=1, top_k=given),
        "stop": lambda given: engine.sample("3", max_tokens=1, stop=given),
        "update: weights": engine.update,
        "forward_backward: loss": lambda given: trainer.forward_backward(data, given),
        "forward_backward: proximal": lambda given: trainer.forward_backward(data, proximal=given),
        "save: folder": trainer.save,
        "load: folder": trainer.load,
        "export: folder": trainer.export,
        "Scheduler: ledger": lambda given: stretto.Scheduler([(2, 3)], ledger=given),
        "Scheduler: tokenizer": lambda given: stretto.Scheduler([(2, 3)], tokenizer=given),
        "Scheduler: version": lambda given: stretto.Scheduler([(2, 3)], version=given),
        "Scheduler: seed": lambda given: stretto.Scheduler([(2, 3)], seed=given),
        "finish: ticket": lambda given: made.finish(given, [said(0)], [1.0]),
        "finish": lambda given: made.finish(ticket, given, [1.0]),
        "rewards": lambda given: made.finish(ticket, [said(0)], given),
        "lose: ticket": lambda given: made.lose(given, "lost"),
        "advance": made.advance,
    }


#: What an argument may be, of the values above.
RIGHT: dict[str, tuple[int, ...]] = {
    "temperature": (1, 6),
    "stop": (3,),
    "build_model: seed": (2,),
    "sample: seed": (2,),
    "Scheduler: seed": (2,),
    "forward_backward: loss": (3, 4),  # refused by its name
}


def test_every_argument_of_a_wrong_kind_is_told_by_its_name(
    engine: stretto.Engine, trainer: stretto.Trainer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, act in verbs(engine, trainer, folder).items():
        for at, wrong in enumerate(WRONG):
            if at in RIGHT.get(name, ()):
                continue
            with pytest.raises((stretto.UserError, stretto.RefusedRequest)) as told:
                act(wrong)
            assert name in str(told.value), (wrong, told.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_token": 3}, "sample: max_token: unknown key; did you mean 'max_tokens'"),
        ({"temprature": 0}, "sample: temprature: unknown key; did you mean 'temperature'"),
        ({"seeds": [1], "n": 3}, "seeds: beside n or seed"),
        ({"seeds": [1], "seed": 3}, "seeds: beside n or seed"),
        ({"n": 10**9}, "n: 1000000000; give a whole number of at least 1 and at most 65536"),
        ({"seed": 10**5000}, "seed: an integer of thousands of digits; give a whole number of at most 2,000 digits"),
        ({"seeds": [10**5000]}, "seeds: a list with an integer of thousands of digits; give a list of whole numbers"),
    ],
)
def test_a_setting_of_sampling_that_would_do_nothing_is_refused(
    engine: stretto.Engine, settings: dict[str, Any], message: str
) -> None:
    for verb in (engine.sample, engine.submit):
        with pytest.raises((stretto.UserError, stretto.RefusedRequest), match=message):
            verb("3", **settings)


@pytest.mark.parametrize(
    ("act", "other"),
    [
        *(("build", other) for other in ("thesis.txt", "checkpoints", "ledger.sqlite", "model.txt", ".hidden")),
        *(("export", "thesis.txt"), ("adapters", "model.txt")),
    ],
)
def test_what_is_no_part_of_a_model_is_not_replaced_by_one(folder: Path, tmp_path: Path, act: str, other: str) -> None:
    place = tmp_path / "place"
    (place / "checkpoints").mkdir(parents=True)
    (place / other).write_text("mine") if other != "checkpoints" else (place / other / "mine").write_text("mine")
    acts: dict[str, Callable[[], object]] = {
        "build": lambda: stretto.build_model(place, alphabet="01", layers=1),
        "export": lambda: stretto.Trainer(folder).export(place),
        "adapters": lambda: stretto.Trainer(folder, lora=2).export(place, adapters_only=True),
    }
    before = {path: path.is_file() and path.read_text() for path in place.rglob("*")}
    with pytest.raises(stretto.ModelFolderError, match=r"no part of a model, which would be lost; give a new folder"):
        acts[act]()
    assert {path: path.is_file() and path.read_text() for path in place.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


@pytest.mark.parametrize("act", ["build", "export", "adapters"])
def test_a_model_is_replaced_only_by_the_command_that_wrote_it(folder: Path, tmp_path: Path, act: str) -> None:
    acts: dict[str, Callable[[Path], object]] = {
        "build": lambda place: stretto.build_model(place, alphabet="01", layers=1),
        "export": lambda place: stretto.Trainer(folder).export(place),
        "adapters": lambda place: stretto.Trainer(folder, lora=2).export(place, adapters_only=True),
    }
    theirs, place = tmp_path / "theirs", tmp_path / "place"
    shutil.copytree(folder, theirs)
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    with pytest.raises(stretto.ModelFolderError, match=r"theirs.*has not written.*give a new folder, or remove") as one:
        acts[act](theirs)
    assert one.value.exit_code == 2
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    acts[act](place)
    acts[act](place)
    with pytest.raises(stretto.ModelFolderError, match="has not written"):
        acts["export" if act == "build" else "build"](place)
    changed = max(place.iterdir(), key=lambda path: path.stat().st_size)
    changed.write_bytes(changed.read_bytes()[::-1])  # other weights of the same size
    with pytest.raises(stretto.ModelFolderError, match="was changed since"):
        acts[act](place)


def test_what_a_folder_says_of_its_writer_is_not_copied_to_a_model_that_is_saved_from_it(tmp_path: Path) -> None:
    start = stretto.build_model(tmp_path / "start", alphabet="01", layers=1)
    save_policy(load_policy(start), start, tmp_path / "saved")
    assert {path.name for path in start.iterdir()} - {path.name for path in (tmp_path / "saved").iterdir()} == {
        "stretto.index.json"
    }


def test_a_file_is_not_replaced_and_an_older_model_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(stretto.ModelFolderError, match="is there, and no folder"):
        stretto.build_model(tmp_path / "notes", alphabet="01", layers=1)
    assert (tmp_path / "notes").read_text() == "mine"
    trainer, place = stretto.Trainer(folder, lora=2), tmp_path / "exported"
    for _ in range(2):
        trainer.export(place)
        trainer.export(tmp_path / "adapter", adapters_only=True)
    assert stretto.Trainer(place).tokenizer.encode("3") == trainer.tokenizer.encode("3")


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_folder_is_given_by_its_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is renamed to it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stretto.ModelFolderError, match="is no name of its own; give a new folder, or an empty one"):
        stretto.build_model(place)


def test_tokens_of_another_tokenizer_are_refused_by_scheduler_and_trainer(
    engine: stretto.Engine, trainer: stretto.Trainer, tmp_path: Path
) -> None:
    other = stretto.Engine.load(stretto.build_model(tmp_path / "other", alphabet="abcdefghij+-*/<>=", layers=1))
    bounds: dict[str, Any] = {"batch_size": 1, "group_size": 2, "max_staleness": 0}
    made = stretto.Scheduler(["3"], tokenizer=engine.tokenizer, **bounds)
    ticket = made.admit()
    assert ticket is not None
    with pytest.raises(stretto.DataError, match=r"answers\[0\]\[0\]: was sampled with another tokenizer"):
        made.finish(ticket, other.sample(ticket, max_tokens=2), [1.0, 0.0])
    made.finish(ticket, engine.sample(ticket, max_tokens=2), [1.0, 0.0])
    batch = made.take()
    assert batch is not None
    assert made.take() is batch
    trainer.forward_backward(batch)
    with pytest.raises(stretto.DataError, match="batch: its tokens are of another tokenizer than this trainer's model"):
        stretto.Trainer(tmp_path / "other").forward_backward(batch)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"logprobs": (math.nan, -1.0)}, "a log-probability of nan"),
        ({"logprobs": (3.0, -1.0)}, "a log-probability of 3.0"),
        ({"token_ids": (-1, 4)}, "a negative token or version"),
        ({"versions": (-1, 0)}, "a negative token or version"),
    ],
)
def test_numbers_that_no_engine_gives_are_not_recorded(tmp_path: Path, numbers: dict[str, Any], message: str) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        made, ticket = scheduler(ledger=ledger)
        with pytest.raises(stretto.DataError, match=message):
            made.finish(ticket, [replace(said(0), **numbers)], [1.0])
        assert ledger.balance().in_flight == 1


def test_of_two_schedulers_with_one_ledger_the_newest_has_it_and_none_has_a_closed_one(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        first, ticket = scheduler(ledger=ledger)
        second, again = scheduler(ledger=ledger)
        assert again.group_id == ticket.group_id
        acts: list[Callable[[], object]] = [first.admit, first.take, lambda: first.finish(ticket, [said(0)], [1.0])]
        for act in acts:
            with pytest.raises(stretto.RunFolderError, match="another scheduler uses this ledger now"):
                act()
        second.finish(again, [said(0)], [1.0])
        with pytest.raises(stretto.DataError, match="put: x: nan; a JSON value is needed"):
            ledger.put("x", math.nan)
        ledger.put("x", "a text")
        with pytest.raises(stretto.DataError, match="get: x: holds no int"):
            ledger.get("x", int)
    acts = [second.admit, second.take, lambda: ledger.put("x", 1), lambda: ledger.get("x", int)]
    for act in acts:
        with pytest.raises(stretto.RunFolderError, match="the ledger is closed; make it again"):
            act()
    with pytest.raises(stretto.RunFolderError, match="the ledger is closed; make it again"):
        scheduler(ledger=ledger)


def test_a_ticket_of_another_scheduler_is_told_by_its_name(tmp_path: Path) -> None:
    first, ticket = scheduler()
    second, other = scheduler()
    assert ticket == other  # and is another one
    strangers = [ticket, copy.copy(other)]
    others: list[tuple[Any, dict[str, Any]]] = [((2, 3), {"seed": 1}), ((2, 3), {"group_size": 2}), ((4, 5), {})]
    for prompt, settings in others:
        made = stretto.Scheduler([prompt], **{"batch_size": 1, "group_size": 1, **settings})
        strangers.append(cast(Any, made.admit()))
    for strange in strangers:
        with pytest.raises(
            stretto.DataError, match=r"finish: ticket: group 0\.0\.0 of another scheduler, or a copy; give"
        ):
            second.finish(strange, [said(0)], [1.0])
        with pytest.raises(
            stretto.DataError, match=r"lose: ticket: group 0\.0\.0 of another scheduler, or a copy; give"
        ):
            second.lose(strange, "its engine is gone")
    for made, own in ((first, ticket), (second, other)):
        made.finish(own, [said(0)], [1.0])
        made.finish(own, [said(0)], [1.0])  # once more: passed over
        assert made.buffered == 1
    for strange in strangers[2:]:  # of a group that has ended, too
        with pytest.raises(stretto.DataError, match="of another scheduler"):
            second.finish(strange, [said(0)] * len(strange.seeds), [1.0] * len(strange.seeds))


def test_a_loss_of_ones_own_gets_the_same_data_from_a_batch_as_from_a_list(trainer: stretto.Trainer) -> None:
    made, ticket = scheduler()
    made.finish(ticket, [said(0, 3)], [1.0])
    batch, seen = made.take(), list[stretto.Datum]()
    assert batch is not None

    def loss(logprobs: Any, data: Any) -> Any:
        seen.extend(data)
        pairs = zip(logprobs, data, strict=True)
        return sum((-one * torch.tensor(datum.weights) * torch.tensor(datum.advantages)).sum() for one, datum in pairs)

    found = trainer.forward_backward(batch, loss, advantages="reward")
    told = stretto.Datum.of((2, 3), (4, 4, 4), logprobs=(-0.5,) * 3, advantages=1.0)
    assert seen == [dataclasses.replace(told, staleness=(0,) * 4)]
    of_loss_tokens = trainer.forward(batch).logprobs[0]
    assert found.loss == pytest.approx(-sum(of_loss_tokens), abs=1e-5)
    assert len(found.logprobs[0]) == 4
    assert found.logprobs[0][1:] == pytest.approx(of_loss_tokens, abs=1e-5)


def test_data_without_a_weight_has_the_loss_0(trainer: stretto.Trainer) -> None:
    assert trainer.forward_backward([stretto.Datum.of((2, 3), (4, 5), weight=0.0)]).loss == 0.0


def test_what_is_needed_is_said_where_it_is_missing(folder: Path) -> None:
    with pytest.raises(stretto.RecipeError, match=r"write stretto.Engine.load\(...\)"):
        stretto.Engine(folder)  # type: ignore[arg-type, call-arg]
    with pytest.raises(stretto.RecipeError, match=r'Engine.load: python: missing, and kind is "vllm"; name the interp'):
        stretto.Engine.load(folder, kind="vllm")
    with pytest.raises(
        stretto.RecipeError, match=r"target_modules: \('nope',\) names no layer of this model; allowed: "
    ):
        stretto.Trainer(folder, lora={"rank": 4, "target_modules": ["nope"]})
    with pytest.raises(stretto.DataError, match=r"Datum.of: prompt: 0 tokens"):
        stretto.Datum.of((), (3, 4))
    with pytest.raises(stretto.DataError, match=r"Datum.of: completion: the text '4'; token ids"):
        stretto.Datum.of((2, 3), cast(Any, "4"))
