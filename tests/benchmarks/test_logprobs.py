"""Promises of the distributions of |Δ log p| on record: they are of every make, type and model family; the page of the
canary shows them; an honest engine keeps a bit of distance from the limit of its type, in whichever 32 tokens it is
judged by; and what is farther than they allow is named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.logprobs import DTYPES, JUDGED, MAKES, beyond, distribution, markdown, models, on_record
from stretto.core.canary import AGREEING
from stretto.loop.engines import proving

PAGE = Path(__file__).parents[2] / "docs" / "canary.md"
RECORD = on_record()


def test_every_make_type_and_family_is_on_record_and_on_the_page() -> None:
    found = {(one.model, one.make, one.dtype, one.way) for one in RECORD}
    computed = {("transformers", DTYPES[1], "scored")} | {
        (make, dtype, way) for make in MAKES[1:] for dtype in DTYPES for way in ("scored", "sampled")
    }
    assert found == {(model, *one) for model in models() for one in computed}
    assert len(RECORD) == len(found)
    assert markdown(RECORD) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_engine_is_a_bit_within_the_limit_wherever_it_is_judged(dtype: str) -> None:
    assert JUDGED == proving._ENOUGH_TOKENS
    farthest = max((one.judged, one.make, one.model) for one in RECORD if one.dtype == dtype)
    assert 2 * farthest[0] < AGREEING[dtype], farthest


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
