"""Promises: the road of a decode step is short. From `NativeEngine.step` to the sampled token the step goes through at
most 12 files of stretto and its kernels, and none of them is entered again while it waits for another one (A calls B
calls A)."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import stretto
import stretto_kernels
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.sampling import sample
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.kernels import use_onednn
from stretto_kernels.steps.trace import module_forward
from tests.engine.answering import request
from tests.model.choosing import always
from tests.tiny_policy import TINY

PACKAGES = tuple(f"{Path(str(one.__file__)).parent}/" for one in (stretto, stretto_kernels))
MOST_FILES = 12  # five of them compiled loops (decisions 51 and 59)


class Road:
    """The files of packages that a call enters until `end` (the code of a function) returns."""

    def __init__(self, *packages: str, end: object = None) -> None:
        self.files: list[str] = []
        self.entered_again: list[str] = []
        self._packages, self._end = packages, end
        self._ended = False

    def follow(self, call: Callable[[], Any]) -> None:
        sys.setprofile(self._event)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if self._ended or not frame.f_code.co_filename.startswith(self._packages):
            return
        if event == "return":
            self._ended = frame.f_code is self._end
        elif event == "call":
            stack = self._stack(frame)
            if stack[0] not in self.files:
                self.files.append(stack[0])
            if len(stack) > 1 and stack[0] != stack[1] and stack[0] in stack[1:]:
                self.entered_again.append(f"{stack[0]} from {stack[1]}")

    def _stack(self, frame: FrameType) -> list[str]:
        """The packages' files from a frame outwards."""
        files, here = [], frame
        while here is not None:
            file = here.f_code.co_filename
            files += [file.removeprefix(package) for package in self._packages if file.startswith(package)]
            here = here.f_back  # type: ignore[assignment]
        return files


@pytest.fixture
def engine(tmp_path: Path) -> NativeEngine:
    """Some completions have their first tokens: the next step decodes and nothing else."""
    build_policy(TINY, tmp_path / "policy", seed=1)
    model = load_policy(tmp_path / "policy", attention=CACHED_ATTENTION)
    use_onednn(model, chooser=always("panels"))  # as on a machine where a kernel has been chosen
    running = NativeEngine(model, EngineConfig(slots=8))
    running.add(request("a", seeds=(1, 2, 3)))
    running.step()
    return running


def test_a_decode_step_goes_through_few_files_and_enters_none_twice(engine: NativeEngine) -> None:
    road = Road(*PACKAGES, end=sample.__code__)
    road.follow(engine.step)
    assert road.files[0] == "engine/native/engine.py"
    assert road.files[-2:] == ["engine/native/sampling.py", "draw.py"]
    assert len(road.files) <= MOST_FILES, road.files
    whole = Road(*PACKAGES)
    whole.follow(engine.step)
    assert not whole.entered_again


def test_nor_does_a_step_that_calls_the_module(engine: NativeEngine) -> None:
    engine._policy.forward_of_model = module_forward(engine._policy.model)
    road = Road(*PACKAGES)
    road.follow(engine.step)
    assert "steps/trace.py" in road.files
    assert not road.entered_again


def test_a_file_that_is_entered_again_is_found(tmp_path: Path) -> None:
    sources = {"a.py": "def back(): pass\ndef start(call): call(back)", "b.py": "def call(other): other()"}
    names: dict[str, Any] = {}
    for name, source in sources.items():
        exec(compile(source, f"{tmp_path}/{name}", "exec"), names)
    road = Road(f"{tmp_path}/")
    road.follow(lambda: names["start"](names["call"]))
    assert (road.files, road.entered_again) == (["a.py", "b.py"], ["a.py from b.py"])
