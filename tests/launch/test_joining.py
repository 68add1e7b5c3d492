"""Promises: `--join FOLDER` takes address, token and certificates from the run's join.json, and what is given by hand
comes first; `stretto scale` waits for as long as the run says that it may take; a machine for which the run has no file
descriptors, or without the GPU that its roles need, is told so; an engine that was drained holds no version in memory;
a server of weights that has served since its last end may end as often as the window says.
"""

import contextlib
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import DeadlineExceeded, RecipeError
from stretto.core.events import Span
from stretto.core.machine import Gpu, Need, place
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.descriptors import no_room_for
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe, load_recipe
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.proving import Proving
from stretto.processes.spawn import FRESH
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.commands.join import dealt, offer, scale
from stretto_app.extensions.machines import Cluster
from stretto_app.extensions.machines import _why_not as why_not
from stretto_cluster.address import JOIN, JoinFile
from stretto_cluster.agent import Offer
from stretto_cluster.machine import JoinedMachine
from tests.cluster.hosting import FIRST, introduction
from tests.launch.running import TINY
from tests.processes.greeting import admit_from_thread


def joined(folder: Path, token: str | None = None, tls: str | None = None) -> Offer:
    return offer(str(folder), token, count=1, host=None, tls=tls, patience=1.0)


def write(folder: Path, content: JoinFile) -> None:
    (folder / JOIN).write_bytes(msgspec.json.encode(content))


def test_address_token_and_certificates_are_those_of_the_run_folder(tmp_path: Path) -> None:
    write(tmp_path, JoinFile(run="run", token="t" * 64, address="10.0.0.1:7420", tls="/certificates"))
    found = joined(tmp_path)
    assert (found.address, found.token, found.tls) == ("10.0.0.1:7420", "t" * 64, "/certificates")
    found = joined(tmp_path, token="u" * 64, tls="/mine")
    assert (found.token, found.tls) == ("u" * 64, "/mine")
    write(tmp_path, JoinFile(run="run", token="t" * 64, address="10.0.0.1:7420"))
    assert joined(tmp_path).tls == ""


def test_a_run_that_takes_no_machines_is_named(tmp_path: Path) -> None:
    write(tmp_path, JoinFile(run="run", token="t" * 64, control="unix:/somewhere"))
    with pytest.raises(RecipeError, match="takes no machines"):
        joined(tmp_path)


@pytest.mark.parametrize("digits", [10, 25, 5_000])
def test_a_number_of_engines_that_no_message_holds_is_a_mistake_of_the_user(tmp_path: Path, digits: int) -> None:
    write(tmp_path, JoinFile(run="run", token="t" * 64, control="unix:/somewhere"))
    with pytest.raises(RecipeError, match="say engines=N, with a number") as refused:
        scale(tmp_path, [f"engines={'9' * digits}"])
    assert len(str(refused.value)) < 200


def test_scale_waits_for_as_long_as_the_run_says(tmp_path: Path) -> None:
    """A listener that never says a word; the handshake has a deadline of its own, of ten seconds."""
    control = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(control))
        endpoint.listen()
        write(tmp_path, JoinFile(run="run", token="t" * 64, control=f"unix:{control}", patience=0.5))
        greeting = threading.Thread(target=_greet, args=(endpoint,))
        greeting.start()
        with pytest.raises(DeadlineExceeded, match=r"stretto scale.*0\.5 s"):
            scale(tmp_path, ["engines=2"])
        greeting.join(20)


def _greet(endpoint: socket.socket) -> None:
    """Admit a caller, and leave it without an answer."""
    connection, _ = endpoint.accept()
    with connection:
        admit_from_thread(connection, "t" * 64, b"run", lambda introduction: "", peer="a command")
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):  # it has cut the connection
            connection.recv(1)


def test_a_machine_for_which_there_are_no_descriptors_is_told_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    try:
        assert no_room_for(1) == ""
        said = no_room_for(512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "512 more engine(s) need 2048" in said
    assert "ulimit -n" in said


def recipe(*settings: str) -> Recipe:
    return load_recipe(TINY, settings)


@pytest.mark.parametrize(
    ("settings", "kind", "gpu", "said"),
    [
        (("engine.device=cuda",), "engine", False, "engine.device is 'cuda', and this machine shows no GPU"),
        (("engine.device=cuda",), "engine", True, ""),
        (("engine.device=auto", "trainer.device=cuda"), "engine", False, ""),
        (
            ("trainer.device=cuda", "trainer.ranks=2", "trainer.remote_ranks=1"),
            "rank",
            False,
            "trainer.device is 'cuda'",
        ),
        (("engine.device=cuda", "trainer.ranks=2", "trainer.remote_ranks=1"), "rank", False, ""),
        ((), "rank", False, "the run's trainer has no ranks on other machines"),
        ((), "trainer", False, "there is no role 'trainer'"),
    ],
)
def test_a_machine_is_asked_for_what_its_roles_need(settings: Sequence[str], kind: str, gpu: bool, said: str) -> None:
    found = why_not(recipe(*settings), introduction(kind=kind, gpu=gpu))
    assert (said in found) if said else (found == "")


@given(st.lists(st.integers(0, 99).map(str), unique=True, max_size=9), st.integers(1, 20))
def test_gpus_are_dealt_evenly_and_shared_only_where_there_are_too_few(ids: list[str], count: int) -> None:
    places = [place["CUDA_VISIBLE_DEVICES"].split(",") for place in dealt(ids, count)]
    assert len(places) == (count if ids else 0)
    taken = Counter(id for place in places for id in place)
    assert set(taken) <= set(ids)
    assert len({len(place) for place in places}) <= 1
    if len(ids) >= count:
        assert max(taken.values()) == 1
    elif ids:
        assert max(taken.values()) - min(taken[id] for id in ids) <= 1


@pytest.mark.parametrize(
    ("settings", "kind", "count", "said"),
    [
        ((), "engine", 9, "9 roles need 9 GPUs, and this machine shows 8: give --count 8"),
        ((), "engine", 8, ""),
        (("engine.device=cpu",), "engine", 9, ""),
        (("engine.kind=vllm", "engine.python=/bin/true", "engine.arguments=['--tp', '4']"), "engine", 3, "--count 2"),
        (("engine.kind=vllm", "engine.python=/bin/true", "engine.arguments=['--tp', '16']"), "engine", 1, "16 GPUs"),
        (("trainer.ranks=10", "trainer.remote_ranks=9", "rollout.batch_size=16"), "rank", 9, "9 roles need 9 GPUs"),
    ],
)
def test_more_roles_than_gpus_are_refused_at_once(settings: Sequence[str], kind: str, count: int, said: str) -> None:
    found = why_not(recipe(*settings), introduction(kind=kind, count=count, gpu=True, gpus=8))
    assert (said in found) if said else (found == "")


class TwoEngines:
    """Of the run's own, on this machine; they leave when they are told to, killed or not."""

    names: Sequence[str] = ("engine-0", "engine-1")

    async def drain(self, names: Sequence[str], why: str) -> None:
        self.names = [name for name in self.names if name not in names]


async def test_what_an_engine_held_for_its_server_is_freed_when_it_has_left(tmp_path: Path) -> None:
    mailbox = tmp_path / "mailbox"
    mailbox.mkdir()
    for name in ("engine-0-000004.held", "engine-1-000003.held", "engine-10-000004.held", "000004.weights"):
        (mailbox / f"stretto-run-v{name}").touch()
    said = list[str]()

    class _Plan:
        recipe = recipe()

    with RunFolder.create(tmp_path / "run") as folder:
        pool, endpoints = cast(EnginePool, TwoEngines()), Endpoints("run", mailbox, tmp_path)
        known = JoinFile(run="run", token="t" * 64)
        cluster = Cluster(cast(Plan, _Plan()), folder, endpoints, pool, said.append, FRESH, known, FIRST)
        assert await cluster.scale(1) == "1 engine; engine-1 left"
    left = sorted(path.name.removeprefix("stretto-run-v") for path in mailbox.iterdir())
    assert left == ["000004.weights", "engine-0-000004.held", "engine-10-000004.held"]


async def test_an_added_engine_takes_the_seat_of_one_that_left_and_no_gpu_is_divided_again(tmp_path: Path) -> None:
    class Joined(TwoEngines):
        changed, proving = print, Proving()

        def join(self, handle: EngineHandle) -> None:
            self.names = [*self.names, handle.name]
            gpus.append(handle.spec.gpus)

    class _Plan:
        recipe = recipe()

    gpus: list[tuple[str, ...]] = []
    needs = [Need(f"engine-{number}", {"weights": 1 << 30}) for number in range(2)]
    seats = place([Gpu(str(number), "H100", 80 << 30, 80 << 30) for number in range(2)], needs)
    with RunFolder.create(tmp_path / "run") as folder:
        pool, endpoints = cast(EnginePool, Joined()), Endpoints("run", tmp_path, tmp_path, seats=seats)
        known = JoinFile(run="run", token="t" * 64)
        cluster = Cluster(cast(Plan, _Plan()), folder, endpoints, pool, print, FRESH, known, FIRST)
        await cluster.scale(1)
        assert await cluster.scale(2) == "2 engines; engine-2 is starting"
        with pytest.raises(RecipeError, match=r"engines: 3, and the GPUs .* among 2 .*; at most 2, or engine.count"):
            await cluster.scale(3)
    assert gpus == [("1",)]


async def test_the_ends_of_a_server_of_weights_count_in_a_row_only_while_nobody_has_pulled_between(
    tmp_path: Path,
) -> None:
    class _Plan:
        recipe = recipe("deadlines.engine_restarts=1", "deadlines.restart_window=0.000001")

    with RunFolder.create(tmp_path / "run") as folder:
        pool, endpoints = cast(EnginePool, TwoEngines()), Endpoints("run", tmp_path, tmp_path)
        known = JoinFile(run="run", token="t" * 64)
        cluster = Cluster(cast(Plan, _Plan()), folder, endpoints, pool, print, FRESH, known, FIRST)
        for _ in range(9):
            assert not cluster._restarts.exceeded_by_one_more()
            pulled = SimpleNamespace(spans=[Span("node-7-1", "pull", start=0.0, end=1.0, version=1)])
            cluster.gate.machines = {"node-7-1": cast(JoinedMachine, pulled)}
            cluster.drain_spans()
        cluster.drain_spans()
        assert [cluster._restarts.exceeded_by_one_more() for _ in range(2)] == [False, True]
