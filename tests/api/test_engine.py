"""`stretto.Engine`.

- A completion depends on its prompt, its place and its seed, and on nothing else; without a seed, calls differ.
- One prompt, one stop text, arrays of token ids and a folder of the user's home may be given as they are; messages have
  a method of their own, and anything else is refused at its place."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import stretto
from stretto.core.errors import EngineLost

PROMPTS = ["3+4=", "9-2=", "1+1="]


@pytest.fixture(scope="module")
def engine(workshop: Path) -> stretto.Engine:
    return stretto.Engine.load(workshop / "model")


def tokens(engine: stretto.Engine, seed: int, temperature: float = 1.0) -> list[tuple[int, ...]]:
    completions = engine.generate(PROMPTS, max_tokens=16, seed=seed, temperature=temperature)
    return [completion.token_ids for completion in completions]


def test_equal_seeds_give_equal_tokens_and_others_other_ones(engine: stretto.Engine, workshop: Path) -> None:
    drawn = {seed: tokens(engine, seed) for seed in range(5)}
    assert {seed: tokens(engine, seed) for seed in reversed(range(5))} == dict(reversed(drawn.items()))
    assert tokens(stretto.Engine.load(workshop / "model"), 3) == drawn[3]
    assert len({tuple(completions) for completions in drawn.values()}) == 5


def test_the_likeliest_tokens_do_not_depend_on_the_seed(engine: stretto.Engine) -> None:
    assert tokens(engine, 1, temperature=0) == tokens(engine, 2, temperature=0)


def test_without_a_seed_each_call_has_other_completions(engine: stretto.Engine) -> None:
    assert len({tuple(c.token_ids for c in engine.generate(PROMPTS * 4, max_tokens=16)) for _ in range(2)}) == 2


def test_a_list_of_tokens_is_one_prompt(engine: stretto.Engine) -> None:
    [one] = engine.generate([2, 3, 4], max_tokens=8, seed=1)
    [as_a_list] = engine.generate([[2, 3, 4]], max_tokens=8, seed=1)
    [as_a_tuple] = engine.generate((2, 3, 4), max_tokens=8, seed=1)
    assert one == as_a_list == as_a_tuple
    assert engine.generate([]) == []


def test_a_stop_text_may_stand_alone(engine: stretto.Engine) -> None:
    [whole] = engine.generate("3+4=", max_tokens=24, seed=1)
    stop = whole.text[2:5]
    [stopped] = engine.generate("3+4=", max_tokens=24, seed=1, stop=stop)
    assert len(stop) == 3
    assert (stopped.stop_reason, stopped.text) == ("stop", whole.text[: whole.text.index(stop) + 3])


def test_the_home_of_the_user_is_found(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workshop))
    assert len(stretto.Engine.load("~/model").generate("3+4=", max_tokens=1)) == 1


def test_arrays_of_token_ids_are_prompts(engine: stretto.Engine) -> None:
    plain = engine.generate([[2, 3, 4], [5, 6, 7]], max_tokens=8, seed=1)
    arrays: list[Any] = [
        np.array([[2, 3, 4], [5, 6, 7]]),
        torch.tensor([[2, 3, 4], [5, 6, 7]]),
        [np.array([2, 3, 4]), torch.tensor([5, 6, 7])],
        [[np.int64(2), 3, 4], (5, 6, np.int32(7))],
    ]
    assert [engine.generate(given, max_tokens=8, seed=1) for given in arrays] == [plain] * 4
    alone = engine.generate([2, 3, 4], max_tokens=8, seed=1)
    assert engine.generate(np.array([2, 3, 4]), max_tokens=8, seed=1) == alone


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (None, "prompts"),
        (3, "prompts"),
        ({"input_ids": [2]}, "prompts"),
        (["3+4=", None], "prompts[1]"),
        ([[2, 3.5]], "prompts[0]"),
        ([2.5], "prompts[0]"),
        ([[{"role": "user", "content": "3+4="}]], "prompts[0]"),
        ([{"role": "user", "content": "3+4="}], "prompts[0]"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_at_its_place(engine: stretto.Engine, given: Any, place: str) -> None:
    with pytest.raises(stretto.RefusedRequest, match="a list of token ids; `chat` takes messages") as refused:
        engine.generate(given)
    assert refused.value.field == place


@pytest.mark.parametrize(
    ("setting", "value"), [("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("min_p", 2), ("temperature", -1)]
)
def test_a_number_out_of_its_range_is_refused_by_its_name(engine: stretto.Engine, setting: str, value: float) -> None:
    with pytest.raises(stretto.RefusedRequest, match=setting):
        engine.generate("3+4=", **{setting: value})  # type: ignore[arg-type]


def test_the_smallest_top_p_takes_the_likeliest_token(engine: stretto.Engine) -> None:
    likeliest = tokens(engine, 1, temperature=0)
    for filtered in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        drawn = engine.generate(PROMPTS, max_tokens=16, seed=3, **filtered)
        assert [completion.token_ids for completion in drawn] == likeliest


def test_messages_go_through_the_chat_template(workshop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(workshop / "model", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ sign }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    engine = stretto.Engine.load(folder)
    asked = [{"role": "user", "content": "3+4"}]
    told = engine.chat(asked, template_arguments={"sign": "="}, max_tokens=8, seed=1)
    assert told == engine.generate("3+4=", max_tokens=8, seed=1)
    both = engine.chat([asked, asked], template_arguments={"sign": "="}, max_tokens=8, seed=1)
    assert both == engine.generate(["3+4="] * 2, max_tokens=8, seed=1)
    assert engine.chat([]) == []
    wrong: Any
    for wrong in (None, "3+4=", [[]], [["3+4="]], {"role": "user"}):
        with pytest.raises(stretto.RefusedRequest, match="a conversation is a list of messages"):
            engine.chat(wrong)


def test_a_model_without_a_template_says_so(engine: stretto.Engine) -> None:
    with pytest.raises(stretto.ModelFolderError, match="the tokenizer has no chat template"):
        engine.chat([{"role": "user", "content": "3+4="}])


def test_a_closed_engine_has_freed_model_and_cache_and_refuses_each_call(workshop: Path) -> None:
    gc.disable()  # the garbage collector is not needed for it
    try:
        engine = stretto.Engine.load(workshop / "model")
        engine.sample("3+4=", max_tokens=4)
        policy = weakref.ref(cast(Any, engine)._source._generation.engine)
        engine.close()
        assert policy() is None
    finally:
        gc.enable()
    for call in (lambda: engine.sample("3+4="), lambda: engine.version, lambda: engine.score(["3+4="])):
        with pytest.raises(EngineLost, match="engine is closed; load another one"):
            call()
