"""Promises: each role gets as many different GPUs as it needs; roles that must be apart are, on GPUs of one kind where
there are enough; no GPU is shared while one is empty that would do; shares of a GPU never exceed it; the decision
depends on its arguments alone. GPUs are read from `nvidia-smi` as it writes, and hidden as CUDA hides them.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.machine import Gpu, Need, on_gpus, parse_gpus, place, visible

GIB = 1 << 30
SMI = """\
0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, 570.86.15
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559, 40000, 9.0, 570.86.15
2, GPU-cc33, Orin, [N/A], [N/A], [N/A], 540.4.0
"""


@st.composite
def machines(draw: st.DrawFn) -> tuple[Gpu, ...]:
    sizes = draw(st.lists(st.sampled_from((0, 16, 80)), min_size=1, max_size=8))
    return tuple(Gpu(str(n), f"of {size}", size * GIB, size * GIB) for n, size in enumerate(sizes))


def needs() -> st.SearchStrategy[list[Need]]:
    sizes = st.integers(1, 60).map(lambda gib: {"policy": gib * GIB})
    ranks = st.lists(sizes.map(lambda parts: Need("rank", parts, apart=True)), max_size=4)
    engines = st.lists(st.builds(Need, st.just("engine"), sizes, st.integers(1, 4)), max_size=6)
    return st.tuples(ranks, engines).map(lambda both: [*both[1], *both[0]])


@given(machines(), needs())
def test_every_role_has_its_gpus_and_none_is_promised_twice(there: tuple[Gpu, ...], wanted: list[Need]) -> None:
    apart = sum(need.apart for need in wanted)
    if apart > len(there) or any(need.gpus > len(there) for need in wanted):
        with pytest.raises(ValueError, match=f"on {len(there)} GPUs"):
            place(there, wanted)
        return
    seats = place(there, wanted)
    assert [seat.need for seat in seats] == wanted
    assert seats == place(there, wanted)
    shares = Counter[str]()
    roles = Counter(id for seat in seats for id in seat.ids)
    for seat in seats:
        assert len(set(seat.ids)) == len(seat.ids) == seat.need.gpus
        assert set(seat.gpus) <= set(there)
        assert 0 <= seat.share <= 1
        assert seat.share == 1 or any(roles[id] > 1 for id in seat.ids)
        shares.update(dict.fromkeys(seat.ids, seat.share))
    assert all(shares[id] <= 1 + 1e-9 for id in roles)
    alone = [seat.ids[0] for seat in seats if seat.need.apart]
    assert len(set(alone)) == len(alone)
    kinds = Counter(gpu.name for gpu in there)
    if apart and max(kinds.values()) >= apart:
        assert len({seat.gpus[0].name for seat in seats if seat.need.apart}) == 1


@given(st.integers(1, 8), needs())
def test_equal_gpus_are_shared_by_as_few_roles_as_possible(count: int, wanted: list[Need]) -> None:
    there = tuple(Gpu(str(n), "H100", 80 * GIB, 80 * GIB) for n in range(count))
    wanted = [Need(need.role, need.parts, 1, need.apart) for need in wanted if need.bytes < 20 * GIB]
    if not wanted or sum(need.apart for need in wanted) > count:
        return
    roles = Counter(id for seat in place(there, wanted) for id in seat.ids)
    assert max(roles.values()) - min((roles[gpu.id] for gpu in there), default=0) <= 1 or len(wanted) > 4 * count


def test_a_role_goes_where_it_fits_first() -> None:
    there = (Gpu("0", "T4", 16 * GIB, 16 * GIB), Gpu("1", "H100", 80 * GIB, 80 * GIB))
    large, small = Need("engine-0", {"weights": 30 * GIB}), Need("engine-1", {"weights": 2 * GIB})
    assert [seat.ids for seat in place(there, [small, large])] == [("0",), ("1",)]
    (seat, beside) = place(there[1:], [Need("rank 0", {"policy": 20 * GIB}, apart=True), small])
    assert (seat.ids, beside.ids) == (("1",), ("1",))
    assert seat.share > beside.share > 0.05
    assert str(seat) == "rank 0      GPU 1: 20.5 of 80.0 GiB (policy 20.0)"


def test_gpus_are_read_as_nvidia_smi_writes_them() -> None:
    first, second, third = parse_gpus(SMI + "No devices were found\n")
    assert first == Gpu("0", "NVIDIA H100 80GB HBM3", 81559 << 20, 81000 << 20, (9, 0), "570.86.15", "GPU-aa11")
    assert second.free == 40000 << 20
    assert (third.memory, third.capability) == (0, (0, 0))


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("1", ["1"]),
        ("2,0", ["2", "0"]),
        ("GPU-bb,0", ["1", "0"]),
        ("0,9,1", ["0"]),
        ("-1", []),
        ("1,1", ["1"]),
        ("MIG-7,1", ["MIG-7", "1"]),
    ],
)
def test_gpus_are_hidden_as_cuda_hides_them(told: str | None, shown: list[str]) -> None:
    found = visible(parse_gpus(SMI), told)
    assert [gpu.id for gpu in found] == shown
    assert on_gpus([gpu.id for gpu in found]).get("CUDA_VISIBLE_DEVICES") == (",".join(shown) or None)
