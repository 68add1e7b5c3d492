"""Promises of the distributions of |Δ log p| on record: each model family has the embedded engine in every type, and
each server has at least four of them; the page of the canary shows them; an honest engine keeps a bit of distance from
the limit of its type, in whichever 32 tokens it is judged by; a server is as near as the embedded engine, whatever the
family; and what is farther than they allow is named."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.logprobs import (
    DTYPES,
    JUDGED,
    MAKES,
    SERVERS,
    UNSERVED,
    WITH_EXPERTS,
    Distribution,
    beyond,
    distribution,
    markdown,
    models,
    on_record,
)
from stretto.core import canary
from stretto.core.canary import agreeing
from stretto.loop.engines import proving

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "canary.md"
RECORD = on_record()


def cells(makes: Sequence[str]) -> set[tuple[str, str, str]]:
    return {(MAKES[0], DTYPES[1], "scored")} | set(product(makes, DTYPES, ("scored", "sampled")))


def test_every_family_on_record_has_the_embedded_engine_and_each_server_four_of_them_and_all_are_on_the_page() -> None:
    found = [(one.model, one.make, one.dtype, one.way) for one in RECORD]
    families = {model for model, *_ in found}
    assert {"qwen3", "qwen3, 12 layers", "llama", "gemma 3", *WITH_EXPERTS} <= families <= set(models())
    served = {make: {one.model for one in RECORD if one.make == make} for make in SERVERS}
    for family in families:
        own = {tuple(rest) for model, *rest in found if model == family}
        assert own == cells(["native", *(make for make in SERVERS if family in served[make])])
    for make in SERVERS:
        assert len(served[make] - {"qwen3, 12 layers"}) >= 4
        assert not any((make, family) in UNSERVED for family in served[make])
    assert len(found) == len(set(found))
    assert markdown(RECORD) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("routed", [False, True], ids=["without experts", "with experts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_engine_is_a_bit_within_the_limit_wherever_it_is_judged(dtype: str, *, routed: bool) -> None:
    assert JUDGED == proving._ENOUGH_TOKENS
    of_type = [one for one in RECORD if one.dtype == dtype]
    farthest = max((one.judged, one.make, one.model) for one in of_type if (one.model in WITH_EXPERTS) == routed)
    assert 2 * farthest[0] < agreeing(dtype, routed=routed), farthest


@pytest.mark.parametrize("one", RECORD, ids=lambda one: f"{one.model} {one.make} {one.dtype} {one.way}")
def test_each_mean_is_a_bit_within_the_narrowest_tolerance_of_its_type_and_depth(one: Distribution) -> None:
    """In units of rounding, which follow from the type, the depth and the log-probabilities of the text."""
    assert one.units * one.unit == pytest.approx(one.mean)
    assert list(one.quantiles) == sorted(one.quantiles)
    assert one.mean <= one.judged <= one.quantiles[-1]
    routed = one.model in WITH_EXPERTS and one.dtype != "float32"
    assert 2 * one.units < proving._UNITS[one.dtype].least * (canary._ROUTED if routed else 1)


def test_no_server_is_a_bit_farther_than_the_embedded_engine_of_the_same_family_and_type() -> None:
    farthest = dict[tuple[str, str, str], float]()
    for one in RECORD:
        cell = one.model, one.dtype, one.make
        farthest[cell] = max(one.units, farthest.get(cell, 0.0))
    for (model, dtype, make), units in farthest.items():
        assert make not in SERVERS or units < 2 * farthest[model, dtype, "native"], (model, dtype, make)


def test_with_experts_transformers_is_as_far() -> None:
    """Where two experts are nearly as likely, rounding chooses, whoever computes."""
    own = {(one.make, one.dtype, one.model): one for one in RECORD if one.model in WITH_EXPERTS and one.way == "scored"}
    for model in WITH_EXPERTS:
        native, plain = own["native", "bfloat16", model], own["transformers", "bfloat16", model]
        assert native.judged < 1.25 * plain.judged


def test_what_is_a_bit_farther_than_on_record_is_named() -> None:
    for one in RECORD:
        assert beyond(one, RECORD) == []
    far = max((one for one in RECORD if one.make == "native"), key=lambda one: one.units)
    assert beyond(replace(far, units=2.1 * far.units), RECORD) != []
    assert beyond(replace(far, quantiles=(2.1 * max(one.largest for one in RECORD) * far.unit,)), RECORD) != []


def test_the_mean_of_the_farthest_tokens_in_a_row_is_found() -> None:
    far, near = [(-1.0, -1.5)] * JUDGED, [(-1.0, -1.0)] * 3 * JUDGED
    found = distribution("a", "native", "float32", "scored", 2, [near, near + far + near])
    assert (found.tokens, found.quantiles[-1]) == (10 * JUDGED, 0.5)
    assert found.judged == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.05)
