"""Promises: "auto" chooses by where the engines are and says why; what cannot be had is refused with a remedy."""

from typing import Any

import pytest

from stretto.core.errors import RecipeError
from stretto.weights.config import Route, WeightsConfig, choose

NATIVE, FAR = Route("native", elsewhere=False), {kind: Route(kind, elsewhere=True) for kind in ("vllm", "sglang")}


@pytest.mark.parametrize(
    ("asked", "route", "medium", "why"),
    [
        *(({}, Route(kind, elsewhere=False), "shared_memory", "on the trainer's machine") for kind in ("native", *FAR)),
        *(({}, route, "http", "each machine pulls a version once") for route in FAR.values()),
        ({"medium": "http"}, FAR["sglang"], "http", "the recipe asks for it"),
        ({"medium": "broadcast"}, Route("sglang", elsewhere=False), "broadcast", "the recipe asks for it"),
    ],
)
def test_a_medium_is_chosen_by_where_the_engines_are(asked: dict[str, Any], route: Any, medium: str, why: str) -> None:
    choice = choose(WeightsConfig(**asked), route)
    assert choice.medium == medium
    assert why in choice.reason


@pytest.mark.parametrize(
    ("medium", "route", "why"),
    [
        ("http", NATIVE, 'and all engines are on the machine .* "auto"'),
        ("shared_memory", FAR["vllm"], 'does not reach .* use "http"'),
        ("broadcast", NATIVE, 'and .*the embedded engine maps the file.* use "auto"'),
        ("broadcast", Route("vllm", elsewhere=False), 'and .*a communicator that only vLLM has.* use "auto"'),
        ("broadcast", FAR["sglang"], 'and .*machines may join, which pull.* use "auto"'),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_remedy(medium: Any, route: Route, why: str) -> None:
    with pytest.raises(RecipeError, match=rf'weights\.medium: "{medium}",? {why}'):
        choose(WeightsConfig(medium=medium), route)
