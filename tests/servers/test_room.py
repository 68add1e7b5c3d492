"""Promises: a server is told the part of its GPUs that the dry run says, and the cache that it plans: what `--dry-run`
shows, the spec and the command agree. Flags of `engine.arguments` win, and a server on a processor gets none."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.machine import Gpu, Need, place
from stretto.engine.config import EngineConfig
from stretto.launch.preflight.devices import notes_of
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto_servers.make import Room, launch_of

GIB = 1 << 30
KINDS = ("vllm", "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers, two key heads of 32."""
    folder = tmp_path_factory.mktemp("model") / "model"
    build_policy(BuildConfig(layers=3, heads=4, kv_heads=2, head_dim=32), folder, seed=1)
    return str(folder)


def config(kind: str, **changes: object) -> EngineConfig:
    told = {"kind": kind, "python": "/usr/bin/python3", "device": "cuda", "dtype": "bfloat16", "cache_gib": 24.0}
    return EngineConfig.model_validate(told | changes)


def flags(asked: EngineConfig, model: str, room: Room | None) -> Mapping[str, str]:
    words = launch_of(asked, model, 1, room).command
    return {name: value for name, value in zip(words, (*words[1:], ""), strict=True) if name.startswith("--")}


def room_beside_a_trainer(cards: int = 1) -> tuple[Room, str]:
    there = [Gpu(str(n), "H100", 80 * GIB, 79 * GIB) for n in range(cards)]
    engine = Need("engine-0", {"weights of the engine": 6 * GIB // cards, "cache": 24 * GIB // cards}, cards)
    seat, _ = seats = place(there, [engine, Need("rank 0", {"weights": 20 * GIB}, apart=True)])
    return Room(seat.room, 80 * GIB, sum(seat.need.parts.values())), next(iter(notes_of(seats)), "")


def test_a_shared_gpu_is_split_as_the_dry_run_says(model: str) -> None:
    room, note = room_beside_a_trainer()
    assert note == "GPU 0 is shared: engine-0 at most 58%, rank 0 at most 39% of its memory"
    assert 0.575 < float(flags(config("vllm"), model, room)["--gpu-memory-utilization"]) <= room.share
    told = flags(config("sglang"), model, room)
    assert float(told["--mem-fraction-static"]) * room.share * room.memory >= 30 * GIB, "weights and cache fit"
    assert float(told["--mem-fraction-static"]) * room.share * room.memory <= 31 * GIB
    assert int(told["--max-total-tokens"]) == 24 * GIB // (2 * 3 * 2 * 32 * 2)


@given(share=st.floats(0.05, 1.0), planned=st.integers(1, 80 * GIB))
def test_no_server_is_told_more_than_its_share(share: float, planned: int) -> None:
    room = Room(share, 80 * GIB, planned)
    assert 0 < float(flags(config("vllm"), "", room)["--gpu-memory-utilization"]) <= min(share, 0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_of_an_engine_is_divided_among_its_cards(kind: str, model: str) -> None:
    """Of two key heads each of four cards has one, so a token takes twice as much."""
    told = flags(config(kind, arguments=("--tp", "4")), model, room_beside_a_trainer(4)[0])
    if kind == "vllm":
        assert int(told["--kv-cache-memory-bytes"]) == 6 * GIB
    else:
        assert int(told["--max-total-tokens"]) == 24 * GIB // (2 * 3 * 4 * 32 * 2)


def test_copies_and_stages_of_the_model_have_cards_and_their_part_of_the_cache(model: str) -> None:
    """Two copies, each in two stages."""
    asked = config("sglang", arguments=("--dp-size", "2", "--pp-size", "2"))
    told = flags(asked, model, room_beside_a_trainer(4)[0])
    assert int(told["--max-total-tokens"]) == 12 * GIB // (2 * 3 * 2 * 32 * 2)
    asked = config("vllm", arguments=("--pipeline_parallel_size=2", "-dp", "2"))
    assert int(flags(asked, model, None)["--kv-cache-memory-bytes"]) == 6 * GIB


@pytest.mark.parametrize(
    ("words", "cards", "copies"),
    [
        ("", 1, 1),
        ("--tp 2 --pp-size=2 --data-parallel-size 3", 12, 3),
        ("-pp 2 -pp 4", 4, 1),
        ("--tp 4 --dp 4 --enable-dp-attention", 4, 1),
        ("--pp x --tp", 1, 1),
    ],
)
def test_the_cards_of_an_engine_are_those_of_all_its_copies(words: str, cards: int, copies: int) -> None:
    asked = config("sglang", arguments=tuple(words.split()))
    assert (asked.gpus, asked.copies) == (cards, copies)


@pytest.mark.parametrize("word", ["--tensor-parallel-size=4", "--tensor_parallel_size=4"])
def test_the_cards_of_an_engine_are_counted_with_dashes_and_with_underscores(word: str) -> None:
    assert config("vllm", arguments=(word,)).gpus == 4


def test_own_arguments_with_underscores_win_too(model: str) -> None:
    room, _ = room_beside_a_trainer()
    own = launch_of(config("vllm", arguments=("--gpu_memory_utilization=0.5",)), model, 1, room).command
    plain = launch_of(config("vllm", arguments=("--gpu-memory-utilization=0.5",)), model, 1, room).command
    assert own[:-1] == plain[:-1]


def test_own_arguments_win_and_a_processor_has_no_room(model: str) -> None:
    room, _ = room_beside_a_trainer()
    own = launch_of(config("vllm", arguments=("--gpu-memory-utilization=0.5",)), model, 1, room).command
    assert [word for word in own if word.startswith("--gpu-memory-utilization")] == ["--gpu-memory-utilization=0.5"]
    for kind in KINDS:
        asked = config(kind, device="cpu")
        assert launch_of(asked, model, 1, room) == launch_of(asked, model, 1, None)
