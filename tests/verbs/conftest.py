"""One small model folder for all tests of the verbs."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest

import stretto
from stretto.model.hf.build import build_policy
from stretto.processes.spawn import FreshSpawner, RunningProcess, Spawn
from tests.launch.warm import session_server
from tests.tiny_policy import TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verbs") / "model"
    build_policy(TINY, path, seed=1)
    return path


@contextmanager
def warmed() -> Iterator[None]:
    """Processes of their own are forked from one that has imported what they need; a fresh one takes seconds for it."""
    fresh, forking = FreshSpawner.start, ContextVar("forking", default=False)

    async def start(spawner: FreshSpawner, spawn: Spawn) -> RunningProcess:
        if forking.get():  # a server that hangs leaves it to a fresh interpreter
            return await fresh(spawner, spawn)
        forking.set(True)
        try:
            return await session_server().start(spawn)
        finally:
            forking.set(False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreshSpawner, "start", start)
        yield


@pytest.fixture
def warm() -> Iterator[None]:
    with warmed():
        yield


@pytest.fixture(scope="session")
def data() -> list[stretto.Datum]:
    """Five completions with log-probabilities and advantages that nobody has made."""
    draw, made = random.Random(1), list[stretto.Datum]()
    for _ in range(5):
        prompt, completion = (tuple(draw.choices(range(2, 22), k=draw.randint(2, 6))) for _ in range(2))
        logprobs = [draw.gauss(-3, 0.4) for _ in completion]
        advantages = [draw.gauss(0, 1) for _ in completion]
        made.append(stretto.Datum.of(prompt, completion, logprobs=logprobs, advantages=advantages))
    return made
