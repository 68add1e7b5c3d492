"""Toy engines and trainers that are forked: an interpreter for each takes a fifth of a second of a processor."""

import atexit
from functools import cache

from stretto_app.forking.server import ForkServer

ENGINE, TRAINER = "tests.loop.toy_engine", "tests.loop.toy_trainer"


@cache
def toys() -> ForkServer:
    """The process that all toys of a session are forked from."""
    server = ForkServer([ENGINE, TRAINER])
    atexit.register(server.close)
    return server
