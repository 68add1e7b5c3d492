"""Promises: "auto" chooses by where the engines are and says why; what cannot be had is refused with a remedy."""

from __future__ import annotations

from typing import Literal

import pytest

from stretto.core.errors import RecipeError
from stretto.weights.config import Route, WeightsConfig, choose


@pytest.mark.parametrize("engines", ["native", "vllm", "sglang"])
def test_on_one_machine_engines_map_the_trainers_file(engines: Literal["native", "vllm", "sglang"]) -> None:
    choice = choose(WeightsConfig(), Route(engines, elsewhere=False))
    assert choice.medium == "shared_memory"
    assert "on the trainer's machine" in choice.reason


@pytest.mark.parametrize("engines", ["native", "vllm", "sglang"])
def test_other_machines_pull(engines: Literal["native", "vllm", "sglang"]) -> None:
    choice = choose(WeightsConfig(), Route(engines, elsewhere=True))
    assert choice.medium == "http"
    assert "each machine pulls a version once" in choice.reason


def test_what_the_recipe_asks_for_is_taken() -> None:
    choice = choose(WeightsConfig(medium="http"), Route("sglang", elsewhere=True))
    assert (choice.medium, choice.reason) == ("http", "the recipe asks for it")


def test_nothing_travels_where_no_engine_is_elsewhere() -> None:
    with pytest.raises(RecipeError, match=r'weights\.medium: "http", and all engines are on the machine .* "auto"'):
        choose(WeightsConfig(medium="http"), Route("native", elsewhere=False))


def test_shared_memory_does_not_reach_another_machine() -> None:
    with pytest.raises(RecipeError, match=r'weights\.medium: "shared_memory" does not reach .* use "http"'):
        choose(WeightsConfig(medium="shared_memory"), Route("vllm", elsewhere=True))


def test_servers_of_sglang_get_weights_by_a_collective() -> None:
    assert choose(WeightsConfig(medium="broadcast"), Route("sglang", elsewhere=False)).medium == "broadcast"


@pytest.mark.parametrize(
    ("engines", "elsewhere", "why"),
    [
        ("native", False, "the embedded engine maps the file"),
        ("vllm", False, "a communicator that only vLLM has"),
        ("sglang", True, "machines may join, which pull"),
    ],
)
def test_what_no_collective_reaches_is_refused(
    engines: Literal["native", "vllm", "sglang"], elsewhere: bool, why: str
) -> None:
    with pytest.raises(RecipeError, match=rf'weights\.medium: "broadcast", and .*{why}.* use "auto"'):
        choose(WeightsConfig(medium="broadcast"), Route(engines, elsewhere))
