"""What every test process inherits: one torch thread each, no network, no GPU, no clock and 25 examples in Hypothesis
(400 with ``--hypothesis-profile=long``).

A machine's GPUs are hidden, so that the suite is the same everywhere: kernels for GPUs run in Triton's interpreter.
Tests that need a GPU are run beside it, with STRETTO_TEST_GPU=1 (`make test-gpu`).

The environment is set before anything imports torch, so that child processes inherit it too: two processes with two
torch threads each on two cores spin against each other and run 10 to 50 times slower."""

import asyncio
import gc
import inspect
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from stretto.processes import event_loop

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
)

if os.environ.get("STRETTO_TEST_GPU") != "1":
    # By NVML: torch's other look at the GPUs would spoil CUDA in every process that is forked from this one.
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})

if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

# The suite judges a change, so it draws the same examples each time; `--hypothesis-profile=drawn` (fresh ones, as many)
# and `=long` (400 of them) look for faults that are older than the change.
settings.register_profile("house", deadline=None, print_blob=True, max_examples=25, derandomize=True)
settings.register_profile("drawn", settings.get_profile("house"), derandomize=False)
settings.register_profile("long", settings.get_profile("drawn"), max_examples=400)
settings.load_profile("house")


# Imports and collected tests stay until the end. To look for garbage among them, again and again, would be a fifth of
# the time that they take. `pytest_collection_finish` turns it on.
gc.disable()

#: Where kernels are chosen by the processor; whole runs choose the same ones.
_NUMERIC = {"model", "trainer", "engine"}


@cache
def _compares_numbers(file: Path) -> bool:
    return file.parent.name in _NUMERIC and "tests.tolerances" in file.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests beside the rule for tolerances are numeric, without a word of their own."""
    for item in items:
        if _compares_numbers(item.path):
            item.add_marker(pytest.mark.numeric)


#: Rooms whose code runs in the event loop of a conductor.
_OF_CONDUCTORS = {"loop", "processes", "rewards", "service"}

#: Of a test that awaits, whatever it waits for.
_MOST_SECONDS = 60


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run = event_loop.run if pyfuncitem.path.parent.name in _OF_CONDUCTORS else asyncio.run
    run(asyncio.wait_for(pyfuncitem.obj(**given), _MOST_SECONDS))
    return True


def pytest_collection_finish() -> None:
    """What is here now stays until the end. The collector of garbage, off until now, need not look at it, which takes a
    second each time: more processor time than a comparison in mathematics may have."""
    gc.freeze()
    gc.enable()
