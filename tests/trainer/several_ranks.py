"""Programs whose ranks are processes of their own, on gloo: how a test runs one, and how it forks its ranks."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch

from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto_cluster.ranks.collectives import open_store
from tests.launch.warm import MARK, WarmCommand


def run_program(module: str, folder: Path, *arguments: str, seconds: float = 200) -> None:
    """Run ``python -m MODULE FOLDER ARGUMENTS``, forked from the process that has imported what it needs."""
    command = WarmCommand([str(folder), *arguments], folder, {**os.environ, MARK: uuid4().hex}, module)
    try:
        said = "".join(command.communicate(seconds))
    finally:
        command.kill()
    assert command.returncode == 0, said


def prepare() -> Path:
    """Make warnings errors, torch compute in one thread, and import what the families in ``FOLDER/models`` need, once
    for all ranks; returns the folder that the program was given."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for family in Path(sys.argv[1], "models").glob("*"):
        skeleton(family, PACKED_ATTENTION)
    return Path(sys.argv[1])


def fork_ranks(count: int, play: Callable[[Path, int, int, int], None], folder: Path) -> None:
    """Call ``play(folder, rank, count, port)`` in a process for each rank; ends this one if one of them has failed."""
    store = open_store(count)  # in the parent: all ranks are its children
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=play, args=(folder, rank, count, store.port)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(f"{count} ranks: one ended with exit code {process.exitcode}")
