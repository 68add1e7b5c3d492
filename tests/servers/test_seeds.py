"""Two requests to a server have two seeds, as far as servers take seeds: vLLM 63 bits, SGLang 31."""

from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.backend import Stream
from stretto_servers.completions import OpenCompletion

SEEDS = st.integers(0, 2**64 - 1)
#: What callers give: small ones, and those beside each other.
GIVEN = SEEDS | st.integers(0, 5) | SEEDS.map(lambda seed: seed ^ 1) | st.integers(2**63, 2**63 + 5)


def asked(seed: int) -> int:
    request = GenerateRequest("a", (1,), (seed,), Sampling(max_tokens=4))
    return OpenCompletion(request, 0, Stream(1), limit=4, watch=None).continuation(0, version=0).seed


@given(GIVEN, GIVEN)
def test_two_seeds_stay_two(one: int, other: int) -> None:
    assert 0 <= asked(one) < 2**63
    assert (asked(one) == asked(other)) == (one == other)
    assert asked(one) == one or one >= 2**63


@given(SEEDS)
def test_seeds_beside_each_other_stay_two(seed: int) -> None:
    beside = asked(seed ^ 1)
    assert asked(seed) != beside
    if seed < 2**63 - 1:
        assert asked(seed) % 2**31 != beside % 2**31  # what SGLang gets
