"""Importing this computes once what each run computes for the first time: kernels are compiled or read, and
libraries fill their caches. Processes forked afterwards have all of it; a fresh one would take most of a second."""

import tempfile
from pathlib import Path

from stretto.model.hf.build import build_policy
from tests.engine.answering import engine_of, finish, request
from tests.tiny_policy import TINY


def heat() -> None:
    """Build a model, and let an engine answer with it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        policy = Path(folder) / "policy"
        build_policy(TINY, policy, seed=1)
        finish(engine_of(policy), request("first", seeds=(1, 2)))


heat()
