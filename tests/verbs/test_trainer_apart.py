"""`stretto.Trainer.apart`: a trainer in a process of its own.

- Its numbers and weights are those of a trainer in this process, bit for bit.
- Mistakes are told as by that one, and leave it usable; a process that is killed is told, at once and from then on.
- A call that is interrupted leaves the next one right, or ends the trainer with a message; none hangs.
"""

import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.store.lock import is_held
from stretto_verbs import role
from stretto_verbs.trainer_apart import UNDO, CallResult, TrainerApart, receive, send
from tests.verbs.conftest import warmed
from tests.verbs.losses import likelihood


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[TrainerApart]:
    with warmed():
        trainer = stretto.Trainer.apart(folder, learning_rate=1e-2)
    with trainer:
        yield trainer


def test_its_process_is_a_program() -> None:
    """Elsewhere it is a fresh interpreter's; here it is forked from a warm one."""
    assert inspect.getsource(role).endswith('\n\nif __name__ == "__main__":\n    sys.exit(main(sys.argv[1:]))\n')


def test_its_weights_are_those_of_a_trainer_here(
    apart: TrainerApart, folder: Path, data: list[stretto.Datum], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stretto.Trainer(folder, learning_rate=1e-2)
    assert here.forward(data).logprobs == apart.forward(data).logprobs
    for loss in ("cross_entropy", likelihood):
        assert here.forward_backward(data, loss).loss == apart.forward_backward(data, loss).loss
        assert here.optim_step(2e-3, beta1=0.8) == apart.optim_step(2e-3, beta1=0.8)
    assert here.version == apart.version == 1
    ours, theirs = here.weights(), apart.weights()
    assert (ours.version, ours.tokenizer) == (theirs.version, theirs.tokenizer)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], one) for name, one in theirs.tensors.items())
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    apart.save(f"~/{tmp_path.name}")
    again = stretto.Trainer(folder)
    assert again.load(tmp_path) == 1
    assert again.forward(data).logprobs == apart.forward(data).logprobs
    with stretto.Engine.load(folder) as engine:
        assert engine.update(theirs) == 1


class Turns:
    """A lock in whose place another thread gets its turn as soon as the first one gives it back."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._lock, self._then = threading.Lock(), [threading.Thread(target=then)]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._then:
            other = self._then.pop()
            other.start()
            other.join(60)


def test_the_version_is_that_of_the_newest_call_whichever_thread_returns_last(
    apart: TrainerApart, data: list[stretto.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = apart.weights().version
    with monkeypatch.context() as changed:
        changed.setattr(apart, "_calls", Turns(apart.optim_step))
        apart.forward_backward(data, "cross_entropy")
        assert apart.version == before + 1


def test_mistakes_are_told_as_here_and_leave_it_usable(
    apart: TrainerApart, data: list[stretto.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(stretto.DataError, match="token"):
        apart.forward([stretto.Datum.of((99_999, 1), (2,))])
    with pytest.raises(stretto.RecipeError, match="learning_rate"):
        apart.optim_step(-1.0)
    with pytest.raises(stretto.RecipeError, match="cannot be imported by another process"):
        apart.forward_backward(data, lambda logprobs, _: logprobs[0].sum())
    elsewhere = types.ModuleType("nowhere_else")
    exec("def loss(logprobs, data): return logprobs[0].sum()", elsewhere.__dict__)
    monkeypatch.setitem(sys.modules, "nowhere_else", elsewhere)
    with pytest.raises(stretto.RecipeError, match=r"forward_backward: an argument: cannot be read in .*nowhere_else"):
        apart.forward_backward(data, elsewhere.loss)
    with pytest.raises(stretto.RecipeError, match="forward_backward: an argument: cannot be sent to another process"):
        apart.forward_backward(data, "ppo", advantages=threading.Lock())
    for verb in ("save", "load", "export"):
        with pytest.raises(stretto.DataError, match=f"{verb}: folder: 3; give the path of a folder"):
            getattr(apart, verb)(3)
    nothing: list[Any] = [[], iter(()), data[0]]
    for one in nothing:
        with pytest.raises(stretto.DataError, match=r"forward_backward: data: .*; give a list of stretto.Datum"):
            apart.forward_backward(one)
    with pytest.raises(stretto.DataError, match=r"forward_backward: data: None; .*take.* has no batch yet"):
        apart.forward_backward(None)  # type: ignore[arg-type]
    expected = apart.forward(data).logprobs
    assert apart.forward(one for one in data).logprobs == expected  # type: ignore[arg-type]


def test_what_cannot_start_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(stretto.ModelFolderError):
        stretto.Trainer.apart(tmp_path)
    with pytest.raises(stretto.DataError, match=r"Trainer.apart: model: 3; give the folder of a model"):
        stretto.Trainer.apart(3)  # type: ignore[arg-type]
    with pytest.raises(stretto.RecipeError, match="learning_rates"):
        stretto.Trainer.apart(folder, learning_rates=1.0)
    with pytest.raises(stretto.RecipeError, match="memory of this process"):
        stretto.Trainer.apart(stretto.SharedModel(folder), lora=4)  # type: ignore[arg-type]


def interrupted(*_: object) -> CallResult:
    raise KeyboardInterrupt


def test_a_call_that_was_interrupted_while_it_waited_leaves_the_next_one_right(
    apart: TrainerApart, data: list[stretto.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and requests that are larger than a pipe holds: neither side may wait for the other to read."""
    expected, long = apart.forward(data).logprobs, [*data] * 800
    result = TrainerApart._result
    for _ in range(2):
        monkeypatch.setattr(TrainerApart, "_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apart.weights()
        monkeypatch.setattr(TrainerApart, "_result", result)
        assert len(apart.forward(long).logprobs) == len(long)
    assert apart.forward(data).logprobs == expected


def test_a_gradient_whose_call_was_interrupted_does_not_count(
    apart: TrainerApart, data: list[stretto.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []
    for broken in (0, 1, 2):
        apart.forward_backward(data, "cross_entropy")
        for _ in range(broken):
            with monkeypatch.context() as patched:
                patched.setattr(TrainerApart, "_result", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    apart.forward_backward(data, "cross_entropy")
        apart.forward_backward(data, "cross_entropy")
        norms.append(apart.optim_step(1e-30, weight_decay=0.0).grad_norm)
    assert norms == [norms[0]] * 3
    with pytest.raises(stretto.DataError, match="there is no gradient"):
        apart.optim_step()


def test_undoing_a_call_that_the_process_could_not_read_keeps_the_gradient_before_it(
    folder: Path, data: list[stretto.Datum]
) -> None:
    near, far = multiprocessing.Pipe()
    threading.Thread(target=role.serve, args=(far,), daemon=True).start()
    told, nothing = pickle.dumps(((data, "cross_entropy"), {})), pickle.dumps(((), {}))
    calls = (("", pickle.dumps(((folder,), {}))), ("forward_backward", told), ("forward_backward", b"no pickle"))
    errors = []
    for number, (method, packed) in enumerate((*calls, (UNDO, nothing), ("optim_step", nothing))):
        send(near, (number, method, packed))
        errors.append(receive(near)[3])
    near.close()
    assert [type(error) for error in errors] == [type(None), type(None), stretto.RecipeError, type(None), type(None)]


def test_a_call_that_was_interrupted_within_a_message_ends_the_trainer(
    folder: Path,
    data: list[stretto.Datum],
    monkeypatch: pytest.MonkeyPatch,
    warm: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("stretto_verbs.background._QUIET_SECONDS", 0.0)

    with stretto.Trainer.apart(folder) as trainer:
        [pid] = trainer.pids
        assert [one.getMessage() for one in caplog.records] == [
            f"Trainer.apart: still starting; what it says is in {trainer._log}"
        ]
        with monkeypatch.context() as patched:
            patched.setattr("stretto_verbs.trainer_apart.receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trainer.forward(data)
        with pytest.raises(stretto.StrettoError, match="interrupted within a message"):
            trainer.forward(data)
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_one_is_told_and_gives_its_folder_back(
    apart: TrainerApart, data: list[stretto.Datum], tmp_path: Path
) -> None:  # the last test of this file: it ends what they share
    apart.save(tmp_path)
    [pid] = apart.pids
    long = [*data] * 2_000
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()

    def train() -> None:
        while True:
            apart.forward_backward(long)

    with pytest.raises(stretto.RoleDied, match="was killed by SIGKILL") as told:
        train()
    assert time.monotonic() - began < 20
    assert Path(told.value.log).exists()
    with pytest.raises(stretto.RoleDied):
        apart.optim_step()
    assert not is_held(tmp_path / "checkpoints")
