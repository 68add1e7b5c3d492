"""Servers of vLLM and SGLang as their packages are, on this machine's processor; one of each for all tests.

Their environments are made once, in the user's cache (`benchmarks.peers.environment`). Where a package cannot be
installed, the tests of that make are skipped, with the installer's last words."""

import inspect
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.peers.environment import Environment, PeerUnavailable
from tests.launch.running import Laboratory
from tests.launch.running import laboratory as laboratory
from tests.real_engines.serving import BUILT, START_SECONDS, Installed, RealServer

collect_ignore = ["verifiers_client.py", "spoilt"]  # run in the environments of verifiers, vLLM and SGLang


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test here may be the one that starts a server: it has `START_SECONDS` beside the limit of other tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(float(config.getini("timeout")) + START_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in the event loop of its server."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    servers = [one for one in given.values() if isinstance(one, RealServer)]
    if not (servers and inspect.iscoroutinefunction(pyfuncitem.obj)):
        return None
    servers[0].run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(scope="session", params=["vllm", "sglang"])
def installed(request: pytest.FixtureRequest) -> Installed:
    """A make, and the interpreter of its environment."""
    kind: Literal["vllm", "sglang"] = request.param
    environment = Environment(kind)
    try:
        python = environment.ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"{kind} cannot be installed: {problem}")
    return Installed(kind, python)


@pytest.fixture(scope="session")
def policy(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the policy that the servers are started with: a run has trained it, and has written it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    laboratory.trained(folder, *BUILT, "trainer.steps=2", "seed=5")
    return folder / "policy" / "v000002"


@pytest.fixture(scope="session")
def server(installed: Installed, policy: Path, request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A running server of each make, in float32."""
    if any(
        {"coarse_server", "either_server"} & set(getattr(item, "fixturenames", ())) for item in request.session.items
    ):
        request.getfixturevalue("starting_coarse_server")  # beside it
    with closing(RealServer(installed, policy, dtype="float32")) as started:
        started.until_up()
        started.note_likeliest()
        yield started


@pytest.fixture(scope="session")
def starting_coarse_server(installed: Installed, policy: Path) -> Iterator[RealServer]:
    with closing(RealServer(installed, policy, dtype="bfloat16")) as started:
        yield started


@pytest.fixture(scope="session")
def coarse_server(starting_coarse_server: RealServer) -> RealServer:
    """The same in bfloat16."""
    starting_coarse_server.until_up()
    starting_coarse_server.note_likeliest()
    return starting_coarse_server


@pytest.fixture(params=["server", "coarse_server"], ids=["float32", "bfloat16"])
def either_server(request: pytest.FixtureRequest, installed: Installed) -> RealServer:
    """In float32, and in bfloat16."""
    found: RealServer = request.getfixturevalue(request.param)
    return found
