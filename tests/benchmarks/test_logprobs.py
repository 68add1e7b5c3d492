"""Promises of the distributions of |Δ log p| on record: each model family has every make and type; the page of the
canary shows them; an honest engine keeps a bit of distance from the limit of its type, in whichever 32 tokens it is
judged by; and what is farther than they allow is named.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.logprobs import DTYPES, JUDGED, MAKES, beyond, distribution, markdown, models, on_record
from stretto.core.canary import AGREEING
from stretto.loop.engines import proving

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "canary.md"
RECORD = on_record()


def test_every_family_on_record_has_every_make_and_type_and_is_on_the_page() -> None:
    found = [(one.model, one.make, one.dtype, one.way) for one in RECORD]
    computed = {(MAKES[0], DTYPES[1], "scored")} | set(product(MAKES[1:], DTYPES, ("scored", "sampled")))
    families = {model for model, *_ in found}
    assert "qwen3" in families <= set(models())
    assert set(found) == {(model, *one) for model in families for one in computed}
    assert len(found) == len(set(found))
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
