"""`stretto.Engine`: a completion depends on its prompt, its place and its seed, and on nothing else."""

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
