"""`stretto.Trainer.apart`: a trainer in a process of its own. Messages are pickled: both processes belong to one user
and one program, so they trust each other.

    call 0: the arguments of the trainer ─► result 0 ─► call 1: a method of the trainer ─► result 1 ─► ...

The arguments of a call are pickled separately, within the message: if the process cannot unpickle them, only this call
fails.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from stretto.core.errors import DeadlineExceeded, Problem, RecipeError, RoleDied, StrettoError
from stretto.loop.config import DeadlinesConfig
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.role import RoleProcess
from stretto.trainer.optimizer import OptimizerStep
from stretto_verbs.arguments import FOLDER, check
from stretto_verbs.background import background, told_if_slow
from stretto_verbs.datum import Data, Forward, listed
from stretto_verbs.models import PolicyWeights

#: (number of the call, name of the method, pickled positional and keyword arguments).
TrainerCall = tuple[int, str, bytes]
#: Name in place of a method: restore the gradient from before the last call.
UNDO = "undo"
#: (number of the call, version of the policy after it, returned value, raised error).
CallResult = tuple[int, int, Any, Exception | None]
#: Arguments of the process: (descriptor of its connection, number of threads, folders for `sys.path`).
TrainerArguments = tuple[int, int, tuple[str, ...]]


def send(connection: Connection, message: TrainerCall | CallResult) -> None:
    """Pickle and write one message. Raises OSError if the other side has ended."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Wait for one message and unpickle it. Raises EOFError or OSError if the other side has ended."""
    return pickle.loads(connection.recv_bytes())


_NAME, _ROLE = "trainer", "stretto_verbs.role"
_GRACE_SECONDS = 1.0


class TrainerApart:
    """A `stretto.Trainer` in a process of its own. Methods and results are the same, bit for bit.

    Example::

        trainer = stretto.Trainer.apart("model", learning_rate=1e-3)
        trainer.forward_backward([stretto.Datum.of((2, 3, 4), (5, 1))], "cross_entropy")
        trainer.optim_step()
        stretto.Engine.load("model").update(trainer.weights())
        trainer.close()

    Each call waits for its result; calls of several threads run one after the other. If a caller is interrupted while
    it waits, the process still carries out the call; only the gradient of an interrupted `forward_backward` is undone.
    If the process is killed or hangs, calls raise RoleDied: create a new trainer, and `load` the last checkpoint.
    """

    def __init__(self, model: Path, settings: Mapping[str, Any], threads: int, deadlines: DeadlinesConfig) -> None:
        """Start the process and wait until its trainer is ready.

        Args:
            model: model folder.
            settings: further arguments of `stretto.Trainer`.
            threads: number of torch threads of the process.
            deadlines: `start` and `hung` are used.

        Raises:
            ModelFolderError, RecipeError: as for `stretto.Trainer`.
            RoleError: the process did not start, or was not ready in time.
        """
        self.tokenizer = load_tokenizer(model)
        self._folder = Path(tempfile.mkdtemp(prefix="stretto-trainer-"))
        self._log = self._folder / f"{_NAME}.txt"
        self._process = RoleProcess(_NAME, _ROLE, self._log, deadlines.hung)
        self._near, self._far = multiprocessing.Pipe()
        self._calls, self._numbers = threading.Lock(), itertools.count()
        self._owed: int | None = None  # number of a call whose result has not been read
        self._undo = False  # the last call is an unfinished `forward_backward`, whose gradient must be undone
        self._ended: StrettoError | None = None
        self._version = 0
        self._end = weakref.finalize(self, _end, self._process, self._near, self._folder)
        try:
            with told_if_slow("Trainer.apart", self._log):
                background().call(self._start(threads))
                self._call("", model, seconds=deadlines.start, **settings)
        except BaseException:
            self.close()
            raise

    async def _start(self, threads: int) -> None:
        arguments: TrainerArguments = (self._far.fileno(), threads, tuple(folder or os.getcwd() for folder in sys.path))
        try:
            await self._process.start(msgspec.Raw(msgspec.json.encode(arguments)), threads, (self._far.fileno(),))
        finally:
            self._far.close()

    @property
    def version(self) -> int:
        """Version of the policy after the last call."""
        return self._version

    @property
    def pids(self) -> list[int]:
        """Process ids of the trainer; empty once it has ended."""
        return self._process.pids

    def forward(self, data: Data) -> Forward:
        """Compute the log-probabilities of the data, as `stretto.Trainer.forward` does."""
        return cast(Forward, self._call("forward", listed(data, "forward")))

    def forward_backward(
        self, data: Data, loss: Any = None, *, proximal: Forward | None = None, **algorithm: Any
    ) -> Forward:
        """Add the gradient of a loss over the data, as `stretto.Trainer.forward_backward` does. If the loss is a
        function, it must be defined at the top of a module.

        Raises:
            RecipeError: another process cannot import the function.
        """
        if callable(loss):
            _check_function(loss)
        data = listed(data, "forward_backward")
        return cast(Forward, self._call("forward_backward", data, loss, proximal=proximal, **algorithm))

    def optim_step(self, learning_rate: float | None = None, **numbers: float | None) -> OptimizerStep:
        """Take an optimizer step and clear the gradient, as `stretto.Trainer.optim_step` does."""
        return cast(OptimizerStep, self._call("optim_step", learning_rate, **numbers))

    def weights(self) -> PolicyWeights:
        """Copy the current weights to the CPU memory of this process, for `Engine.update`."""
        return cast(PolicyWeights, self._call("weights"))

    def save(self, folder: str | Path) -> Path:
        """Save a checkpoint below `folder`, as `stretto.Trainer.save` does; returns the checkpoint's folder."""
        return cast(Path, self._call("save", _place(folder, "save")))

    def load(self, folder: str | Path, *, optimizer: bool = True) -> int:
        """Load the newest checkpoint of `folder`, as `stretto.Trainer.load` does; returns its version."""
        self._call("load", _place(folder, "load"), optimizer=optimizer)
        return self._version

    def export(self, folder: str | Path, *, adapters_only: bool = False) -> None:
        """Write the policy as a Hugging Face folder, as `stretto.Trainer.export` does."""
        self._call("export", _place(folder, "export"), adapters_only=adapters_only)

    def close(self) -> None:
        """End the process, and release the locks of the folders that it has saved to. Later calls raise StrettoError.
        Raises DeadlineExceeded if SIGKILL does not end it."""
        self._ended = self._ended or StrettoError("the trainer is closed; make another one")
        if (ending := self._end()) is not None:
            ending.result(2 * _GRACE_SECONDS + 5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any, seconds: float | None = None, **named: Any) -> Any:
        """Call a method of the trainer in the process ("": create the trainer); returns its result or raises its error.
        Raises RoleDied if the process has died, then or before. `seconds`: timeout; None: no timeout."""
        packed = _packed(method or "Trainer.apart", arguments, named)
        with self._calls:
            if self._ended is not None:
                raise self._ended
            try:
                self._catch_up()
                _, version, value, error = self._result(self._begin(method, packed), seconds)
                self._undo, self._version = False, version
            except (EOFError, OSError):
                self._ended = RoleDied(_NAME, background().call(self._process.last_words()), str(self._log))
                self._end.detach()  # its log stays
                self._near.close()
                raise self._ended from None
        if error is not None:
            raise error
        return value

    def _catch_up(self) -> None:
        """Finish a call whose caller was interrupted: read its result, and undo its gradient if it was
        `forward_backward`."""
        if self._owed is not None:
            self._result(self._owed, None)
        if self._undo:
            self._result(self._begin(UNDO, _packed(UNDO, (), {})), None)

    def _begin(self, method: str, packed: bytes) -> int:
        """Send a call; returns its number, whose result is owed from now on."""
        number = next(self._numbers)
        self._owed, self._undo = number, method == "forward_backward"
        with self._message():
            send(self._near, (number, method, packed))
        return number

    def _result(self, number: int, seconds: float | None) -> CallResult:
        """Wait for the result of call `number`, skipping those of interrupted ones. Raises DeadlineExceeded after
        `seconds` (None: never)."""
        while True:
            if not self._near.poll(seconds):
                raise DeadlineExceeded("trainer", "its process to be ready", seconds or 0.0)
            with self._message():
                found: CallResult = receive(self._near)
            if found[0] == number:
                self._owed = None
                return found

    @contextmanager
    def _message(self) -> Iterator[None]:
        """Context manager: if its block is interrupted in the middle of a message, all further calls raise, because the
        next message would be unreadable."""
        try:
            yield
        except (EOFError, OSError):
            raise
        except BaseException:
            told = "a call of the trainer was interrupted within a message; close it and make another"
            self._ended = StrettoError(told)
            raise


def _place(folder: str | Path, verb: str) -> Path:
    """Make the path of a folder absolute, since the process may have another working directory. Raises DataError if
    `folder` is no path. `verb`: name of the called method, for messages."""
    check(verb, folder=(folder, FOLDER))
    return Path(folder).expanduser().absolute()


def _packed(method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of a call, as the pair of `arguments` and `named`. `method`: its name, for messages. Raises
    RecipeError if an argument cannot be pickled; nothing has been sent then."""
    try:
        return pickle.dumps((arguments, dict(named)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling a user's object may raise anything
        told, remedy = f"cannot be sent to another process: {error}", "give numbers, texts, tensors, stretto's own data"
        raise RecipeError([Problem(f"{method}: an argument", told, remedy)]) from error


def _check_function(loss: Any) -> None:
    """Raise RecipeError if another process cannot import a loss function."""
    try:
        pickle.dumps(loss)
    except (pickle.PicklingError, AttributeError, TypeError):
        importable = False
    else:
        importable = getattr(loss, "__module__", "") != "__main__"
    if not importable:
        name = getattr(loss, "__qualname__", repr(loss))
        told, remedy = f"{name} cannot be imported by another process", "define it at the top of a module of its own"
        raise RecipeError([Problem("forward_backward: loss", told, remedy)])


def _end(process: RoleProcess, connection: Connection, folder: Path) -> Future[None]:
    """Begin to end the process and to remove `folder`, which has its log; returns a future of the end. Does not wait,
    since the garbage collector may call this in any thread."""
    connection.close()
    ending = background().start(process.stop(_GRACE_SECONDS))
    ending.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
    return ending
