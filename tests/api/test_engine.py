"""`stretto.Engine`.

- A completion depends on its prompt, its place and its seed, and on nothing else; without a seed, calls differ.
- One prompt, one stop text and a folder of the user's home may be given as they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto

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
    drawn = {tuple(c.token_ids for c in engine.generate(PROMPTS * 4, max_tokens=16)) for _ in range(2)}
    assert len(drawn) == 2


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
    assert stopped.stop_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop) + 3]


def test_the_home_of_the_user_is_found(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workshop))
    assert len(stretto.Engine.load("~/model").generate("3+4=", max_tokens=1)) == 1
