"""Promises: a delta laid over its base gives the target, to the bit, for any tensors; over anything else, or cut or
flipped, it gives no weights; a mirror gets the same publication by a delta as in full, and says which it was and why.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.core.errors import TornPublication
from stretto.weights.folder import map_file, path_of
from stretto.weights.manifest import read_header, verify
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_cluster.weights import delta
from stretto_cluster.weights.mirror import Mirror, Pulled
from tests.cluster.weights.serving import KEY, Road, flipping

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


def published(folder: Path, **versions: dict[str, Tensor]) -> list[memoryview]:
    """The bytes of ``v0=..., v1=...``."""
    publisher = SharedMemoryPublisher("run", folder)
    images = []
    for name, tensors in versions.items():
        version = int(name.removeprefix("v"))
        publisher.publish(version, tensors.items())
        images.append(memoryview(path_of("run", folder, version).read_bytes()))
    return images


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def encoded(base: memoryview, target: memoryview, folder: Path, largest: float = 9.0) -> memoryview | None:
    with (folder / "delta").open("wb", buffering=0) as file:
        return memoryview((folder / "delta").read_bytes()) if delta.encode(base, target, file, largest) else None


def applied(base: memoryview, difference: memoryview, folder: Path) -> memoryview:
    with (folder / "made").open("wb", buffering=0) as file:
        delta.apply(base, difference, file)
    return memoryview((folder / "made").read_bytes())


@st.composite
def changes(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors, and the same with some runs of bytes changed; all bit patterns occur, those of NaN too."""
    before, after = {}, {}
    for number in range(draw(st.integers(0, 4))):
        width, count = draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(0, 2000))
        seed = draw(st.integers(0, 2**32))
        old = torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        new = old.clone()
        for place in draw(st.lists(st.integers(0, max(count * width - 1, 0)), max_size=6)) if count else ():
            new[place : place + draw(st.integers(1, 700))] ^= draw(st.integers(0, 255))
        before[f"w{number}"], after[f"w{number}"] = old.view(DTYPES[width]), new.view(DTYPES[width])
    return before, after


@given(changes())
def test_a_delta_over_its_base_is_the_target_for_any_tensors(pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    with temporary() as folder:
        base, target = published(folder, v3=pair[0], v4=pair[1])
        difference = encoded(base, target, folder)
        assert difference is not None
        assert applied(base, difference, folder) == target


def test_the_pieces_of_a_delta_are_the_distances_and_the_new_values(tmp_path: Path) -> None:
    """Elements 2 and 1000 of 2,000 change: 1000 is 998 after 2, which is three steps of 256 over unchanged elements and
    one of 230. So five elements are named, by 2, 255, 255, 255, 229 and their values 7, 0, 0, 0, 9."""
    old = torch.zeros(2000, dtype=torch.uint8)
    new = old.clone()
    new[2], new[1000] = 7, 9
    base, target = published(tmp_path, v0={"w": old}, v1={"w": new})
    difference = encoded(base, target, tmp_path)
    assert difference is not None
    assert bytes(difference[-10:]) == bytes([2, 255, 255, 255, 229, 7, 0, 0, 0, 9])


def test_a_delta_over_pieces_of_a_million_elements(tmp_path: Path) -> None:
    old = torch.zeros((1 << 20) + 5, dtype=torch.bfloat16)
    new = old.clone()
    new[[0, (1 << 20) - 1, 1 << 20, (1 << 20) + 4]] = 1.0
    base, target = published(tmp_path, v0={"w": old, "f": torch.ones(3)}, v1={"w": new, "f": torch.zeros(3)})
    difference = encoded(base, target, tmp_path, delta.LARGEST)
    assert difference is not None
    assert applied(base, difference, tmp_path) == target


def test_a_delta_over_half_the_whole_is_not_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    base, target = published(
        tmp_path, v0={"w": torch.randn(9000, generator=generator)}, v1={"w": torch.randn(9000, generator=generator)}
    )
    assert encoded(base, target, tmp_path, delta.LARGEST) is None


def small(value: float) -> dict[str, Tensor]:
    return {"a": torch.arange(4000).bfloat16() + value, "b": torch.ones(50, dtype=torch.float32)}


def test_a_delta_over_another_base_is_refused(tmp_path: Path) -> None:
    first, second, third = published(tmp_path, v0=small(0), v1=small(1), v2=small(2))
    difference = encoded(second, third, tmp_path)
    assert difference is not None
    with pytest.raises(TornPublication, match="cannot be laid over"):
        applied(first, difference, tmp_path)


def test_a_delta_cut_at_any_byte_or_flipped_at_any_bit_gives_no_weights(tmp_path: Path) -> None:
    old, new = torch.zeros(600, dtype=torch.uint8), torch.zeros(600, dtype=torch.uint8)
    new[::13] = 5
    base, target = published(tmp_path, v0={"w": old}, v1={"w": new})
    difference = encoded(base, target, tmp_path)
    assert difference is not None
    for cut in range(len(difference)):
        with pytest.raises(TornPublication):
            applied(base, difference[:cut], tmp_path)
    wrong = 0
    for bit in range(len(difference) * 8):
        damaged = bytearray(difference)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            made = applied(base, memoryview(damaged), tmp_path)
            verify(made, 1)
            wrong += made != target
        except TornPublication:
            continue
    assert wrong == 0


# Over the wire.


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "home"


def step(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """400,000 numbers, a few of which differ from those of another version in bfloat16, and all in float32."""
    numbers = torch.randn(400_000, generator=torch.Generator().manual_seed(3))
    return {"w": (numbers + numbers.abs() * 1e-4 * version).to(dtype), "b": torch.ones(7, dtype=dtype)}


async def pull_all(home: Path, versions: list[dict[str, Tensor]], ours: Mirror) -> list[Pulled]:
    """Publish and pull one after the other; each is compared with what was published."""
    publisher, pulls = SharedMemoryPublisher("run", home), list[Pulled]()
    for version, tensors in enumerate(versions):
        publisher.publish(version, tensors.items())
        pulls.append(await ours.pull(version))
        assert path_of("run", ours.folder, version).read_bytes() == path_of("run", home, version).read_bytes()
    return pulls


async def test_the_second_version_is_a_delta_and_the_mailbox_is_the_same(source: str, home: Path, away: Path) -> None:
    first, second, third = await pull_all(
        home, [step(0), step(1), step(2)], Mirror(source, KEY, "run", away, delta="always")
    )
    assert (first.delta, second.delta, third.delta) == (False, True, True)
    assert first.reason == "in full: no other version is here"
    assert second.reason.startswith("delta: about ")
    assert second.bytes < 0.2 * first.bytes
    assert sorted(path.suffix for path in home.iterdir()) == [".delta", ".spare", ".weights", ".weights"]


async def test_where_most_elements_change_the_whole_comes_and_why_is_told(source: str, home: Path, away: Path) -> None:
    versions = [step(version, torch.float32) for version in (0, 1)]
    _, second = await pull_all(home, versions, Mirror(source, KEY, "run", away, delta="always"))
    assert not second.delta
    assert second.reason == "in full: about 100.0% of the elements have changed"


async def test_never_is_never(source: str, home: Path, away: Path) -> None:
    pulls = await pull_all(home, [step(0), step(1)], Mirror(source, KEY, "run", away, delta="never"))
    assert [(pull.delta, pull.reason) for pull in pulls] == [(False, 'in full: weights.delta is "never"')] * 2


async def test_auto_measures_both_forms_and_then_takes_one_by_its_seconds(source: str, home: Path, away: Path) -> None:
    pulls = await pull_all(home, [step(v) for v in range(4)], Mirror(source, KEY, "run", away))
    assert [pull.delta for pull in pulls[:2]] == [False, True]
    assert all(pull.delta or "a GB took" in pull.reason for pull in pulls[2:])


async def test_a_server_that_has_no_base_any_more_sends_the_whole(source: str, home: Path, away: Path) -> None:
    ours = Mirror(source, KEY, "run", away, delta="always")
    await pull_all(home, [step(0)], ours)
    for version in (1, 2):
        SharedMemoryPublisher("run", home).publish(version, step(version).items())
    pulled = await ours.pull(2)
    assert pulled.reason == "in full: the version that the mirror has is not published any more"


async def test_a_delta_to_an_older_version_leaves_those_to_newer_ones_there(tmp_path: Path) -> None:
    """As one that took longer to make, or one of a mirror that goes back with a resumed run."""
    numbers = torch.arange(1000.0)
    images = published(tmp_path, v1={"a": numbers}, v2={"a": numbers.clone().index_fill_(0, torch.tensor([7]), -1)})
    older, newer = (read_header(image)[0].seal for image in images)
    deltas = delta.Deltas("run", tmp_path)
    forward, _ = await deltas.made(older, 2, newer)
    back, _ = await deltas.made(newer, 1, older)
    assert forward.exists()
    assert back.exists()
    third = numbers.clone().index_fill_(0, torch.tensor([8]), -1)
    seal = read_header(published(tmp_path, v3={"a": third})[0])[0].seal
    await deltas.made(newer, 3, seal)
    assert not forward.exists()
    assert not back.exists()


async def test_a_delta_that_is_flipped_on_the_road_is_pulled_again_in_full(source: str, home: Path, away: Path) -> None:
    async with Road(source, flipping(20_000, only=2)).opened() as road:
        _, second = await pull_all(home, [step(0), step(1)], Mirror(road.address, KEY, "run", away, delta="always"))
    assert not second.delta
    assert second.reason == "in full: the delta gave other bytes"


async def test_a_base_that_was_damaged_here_is_no_base(source: str, home: Path, away: Path) -> None:
    """Its header is whole, so its seal is that of the server's; the checksums of the result do not fit."""
    ours = Mirror(source, KEY, "run", away, delta="always")
    await pull_all(home, [step(0)], ours)
    held = path_of("run", away, 0)
    image = bytearray(held.read_bytes())
    image[read_header(memoryview(image))[1] + 40_001] ^= 8
    held.write_bytes(image)
    SharedMemoryPublisher("run", home).publish(1, step(1).items())
    pulled = await ours.pull(1)
    assert pulled.reason == "in full: the delta gave other bytes"
    verify(map_file(path_of("run", away, 1)), 1)
