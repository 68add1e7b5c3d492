"""All errors of stretto, in one class tree.

    StrettoError
    ├── UserError                a mistake of the user; exit code 2, one message, no traceback
    │   ├── RecipeError          a recipe file or an override; lists every problem of the file at once
    │   ├── DataError            a dataset file or one of its rows
    │   ├── ModelFolderError     a Hugging Face folder that cannot be loaded or written
    │   ├── RewardFunctionError  a reward that cannot be called, or that returns an invalid value
    │   ├── RunFolderError       a run folder that is missing, in use, or of another run
    │   └── WorkflowError        a workflow that cannot be used, or most of whose trajectories fail
    ├── RoleError                a process of the run
    │   ├── RoleDied             it ended without being asked to
    │   ├── RoleFailed           it reported an error from which it cannot continue
    │   │   └── UnprovenWeights  an engine that does not compute with the version it has loaded
    │   ├── CheckpointLost       the trainer ended before a checkpoint was written
    │   ├── EngineLost           an engine that cannot be reached, or that broke off a completion
    │   │   ├── EngineLied       its server returned impossible results, which are dropped
    │   │   └── EngineLeft       it has left the run; its requests are not the cause
    │   ├── MachineLost          a machine that ran roles no longer answers, or has left
    │   ├── SourceLost           a server of weights that cannot be reached, or that broke off a transfer
    │   ├── DeadlineExceeded     a wait ran past its deadline; names the owner and what was awaited
    │   └── NothingMoves         no process makes progress; names who waits for what
    ├── WireError                an incomplete message or publication
    │   ├── TornPublication      weights whose size or checksum does not fit
    │   ├── RefusedRequest       a request the engine will not serve; names the field
    │   └── HandshakeRefused     a peer that did not prove the shared token, or did not admit this process
    │       └── HandshakeBroken  a peer that closed the connection before it admitted or refused this process
    ├── StoreError               the run folder's contents contradict themselves
    ├── CallInterrupted          a call that was interrupted and must not be repeated
    ├── OutOfMemory              a device had no room for a step
    ├── TrainingDiverged         gradients that are not finite, step after step
    └── BoundViolated            a promise of the system was about to be broken (a bug, never bad luck)

Errors cross process boundaries, so each can be rebuilt from its arguments (it pickles).
"""

from __future__ import annotations

import contextlib
import difflib
import stat
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

#: What decoding bytes of others with msgspec may raise: bytes of another form, text that is not UTF-8, deep nesting.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class StrettoError(Exception):
    """Base class of all errors that stretto raises. `exit_code`: exit code of a command that ends with the error.

    Example::

        try:
            stretto.open_run("nowhere")
        except stretto.StrettoError as error:
            print(error, error.exit_code)
    """

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One mistake: its place, the value found, the remedy.

    Example: ``Problem("recipes/a.toml: trainer.step", "unknown key", "did you mean trainer.steps?")``
    """

    place: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


class UserError(StrettoError):
    """A mistake that the user can correct. `problems` holds every mistake found, not only the first.

    Example::

        try:
            stretto.train("recipe.toml", trainer={"step": 3}, rollout={"group_size": 0})
        except stretto.UserError as error:
            for problem in error.problems:
                print(problem.place, problem.found, problem.remedy)
    """

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RecipeError(UserError):
    """A mistake in a recipe (a file or a dict) or in an override of its values.

    Example::

        try:
            stretto.train("recipe.toml", trainer={"step": 3})
        except stretto.RecipeError as error:
            print(error)  # override trainer.step: unknown key; did you mean 'steps'?
    """


class DataError(UserError):
    """A mistake in a dataset file, one of its rows, or a prompt.

    Example::

        try:
            stretto.Engine.load("model").generate("3 times 4")
        except stretto.DataError as error:
            print(error)
    """


class Mistakes:
    """Collects errors of one class from several blocks (``with mistakes:``); `done` raises them together. The error
    ends its block, and the program goes on after it."""

    def __init__(self, kind: type[UserError] = DataError) -> None:
        """Collect nothing yet. `kind`: class of the errors that are collected; others are raised."""
        self._collected, self._first, self.problems = kind, kind, list[Problem]()

    def __enter__(self) -> None:
        """Start a block; its error is collected."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, self._collected):
            return False
        self._first = self._first if self.problems else type(error)
        self.problems += error.problems
        return True

    def done(self) -> None:
        """Raise the collected problems, without duplicates, as one error of the first one's class, if there are any."""
        if self.problems:
            raise self._first(dict.fromkeys(self.problems))


class ModelFolderError(UserError):
    """A model folder that cannot be loaded, or a folder that cannot be replaced by one.

    Example::

        try:
            stretto.Engine.load("nowhere")
        except stretto.ModelFolderError as error:
            print(error)
    """


class RewardFunctionError(UserError):
    """A reward that cannot be called, or that returns an invalid value.

    Example::

        try:
            stretto.train("recipe.toml", rewards={"function": "final_anser"})
        except stretto.RewardFunctionError as error:
            print(error)
    """


class RunFolderError(UserError):
    """A run folder that is missing, in use, not writable, or of another run than the one asked for.

    Example::

        try:
            stretto.open_run("nowhere")
        except stretto.RunFolderError as error:
            print(error)
    """


class WorkflowError(UserError):
    """A workflow that cannot be used, or most of whose trajectories fail.

    Example::

        try:
            stretto.train("recipe.toml", workflow={"function": "multiturn"})
        except stretto.WorkflowError as error:
            print(error)
    """


class RoleError(StrettoError):
    """A process of the run failed. The subclass `DeadlineExceeded` is a wait for one that ran past its deadline.
    Example::

        try:
            stretto.evaluate("model", "recipe.toml", deadlines={"start": 0.001})
        except stretto.RoleError as error:
            print(error)
    """


class RoleDied(RoleError):
    """A process of the run ended without being asked to. Also raised if it cannot be started. `role`: its name; `how`
    it ended, as "was killed by SIGKILL"; `log`: path of its log, "" if it has none.

    Example::

        try:
            print(stretto.train("recipe.toml", trainer={"steps": 1}).wait().accuracy)
        except stretto.RoleDied as error:
            print(error.role, error.how, error.log)
    """

    def __init__(self, role: str, how: str, log: str = "") -> None:
        self.role, self.how, self.log = role, how, log
        super().__init__(role, how, log)

    def __str__(self) -> str:
        return f"{self.role} {self.how}" + (f"; see the end of {self.log}" if self.log else "")


class RoleFailed(RoleError):
    """A process of the run reported an error from which it cannot continue; `exit_code` is that of the error."""

    def __init__(self, role: str, problem: str, exit_code: int) -> None:
        self.role, self.problem, self.exit_code = role, problem, exit_code
        super().__init__(role, problem, exit_code)

    def __str__(self) -> str:
        return f"{self.role}: {self.problem}"


class UnprovenWeights(RoleFailed):
    """An engine that has failed the proof of a version after loading it twice (`core.canary`), or whose sampled tokens
    disagree with recomputed ones."""


class CheckpointLost(RoleError):
    """The trainer ended before a checkpoint was written; `death` says how."""

    def __init__(self, checkpoint: str, death: str) -> None:
        self.checkpoint, self.death = checkpoint, death
        super().__init__(checkpoint, death)

    def __str__(self) -> str:
        return f"the checkpoint {self.checkpoint} was not written: {self.death}"


class EngineLost(RoleError):
    """An engine cannot be reached, or broke off a completion; its requests go to another engine. `engine`: its name;
    `how`: what it did, as "closed its connection"."""

    def __init__(self, engine: str, how: str) -> None:
        self.engine, self.how = engine, how
        super().__init__(engine, how)

    def __str__(self) -> str:
        return f"{self.engine} {self.how}"


class EngineLied(EngineLost):
    """The server behind an engine returned results that cannot be right, such as damaged tokens or a completion that
    nobody requested; all its results for the request must be dropped."""


class EngineLeft(EngineLost):
    """The engine, or its machine, has left the run; its requests are not the cause."""


class MachineLost(RoleError):
    """A machine that ran roles has left the run or no longer answers, so its roles cannot be restarted there."""

    def __init__(self, machine: str, how: str) -> None:
        self.machine, self.how = machine, how
        super().__init__(machine, how)

    def __str__(self) -> str:
        return f"{self.machine} {self.how}"


class SourceLost(RoleError):
    """A weights server cannot be reached, or broke off a transfer and did not return."""

    def __init__(self, source: str, how: str) -> None:
        self.source, self.how = source, how
        super().__init__(source, how)

    def __str__(self) -> str:
        return f"the weights server {self.source} {self.how}"


class DeadlineExceeded(RoleError):
    """A wait ran past its deadline: `owner` (a role) waited `seconds` for `awaited`, such as "engine-0 to start"."""

    def __init__(self, owner: str, awaited: str, seconds: float) -> None:
        self.owner, self.awaited, self.seconds = owner, awaited, seconds
        super().__init__(owner, awaited, seconds)

    def __str__(self) -> str:
        return f"{self.owner} waited {self.seconds:g} s for {self.awaited} and gave up"


class NothingMoves(RoleError):
    """The run made no progress within `deadlines.still`; `waits` says who waits for what."""

    def __init__(self, seconds: float, waits: Iterable[str]) -> None:
        self.seconds, self.waits = seconds, tuple(waits)
        super().__init__(seconds, self.waits)

    def __str__(self) -> str:
        return f"nothing has moved for {self.seconds:g} s: " + ("; ".join(self.waits) or "nobody waits for anything")


class WireError(StrettoError):
    """A message or publication that is incomplete, invalid, too large or refused, or a version that is not there."""


class TornPublication(WireError):
    """Weights that do not match their manifest in size, names or checksum; they are never loaded."""


class RefusedRequest(WireError):
    """A request refused by an engine, with the field that is wrong.

    Example::

        try:
            stretto.Engine.load("model").generate("3+4=", max_tokens=0)
        except stretto.RefusedRequest as error:
            print(error.field, error.found, error.allowed)
    """

    def __init__(self, field: str, found: str, allowed: str) -> None:
        self.field, self.found, self.allowed = field, found, allowed
        super().__init__(field, found, allowed)

    def __str__(self) -> str:
        return f"{self.field}: {self.found}; {self.allowed}"


class HandshakeRefused(WireError):
    """The peer did not prove the shared token, did not admit this process, or uses another protocol."""

    def __init__(self, peer: str, how: str) -> None:
        self.peer, self.how = peer, how
        super().__init__(peer, how)

    def __str__(self) -> str:
        return f"{self.peer} {self.how}"


class HandshakeBroken(HandshakeRefused):
    """The peer closed the connection before it admitted or refused this process; worth a retry."""


class StoreError(StrettoError):
    """A run folder whose contents are damaged or contradictory. Also raised if the contents cannot be written.
    Example::

        try:
            print(len(list(stretto.open_run("runs/first").trajectories())))
        except stretto.StoreError as error:
            print(error)
    """


class CallInterrupted(StrettoError):
    """A session's call had started when its process ended: it may have taken effect, so it must not be repeated.
    `session`: id of the session; `asked`: the call, shortened for the message."""

    def __init__(self, session: str, asked: str) -> None:
        self.session, self.asked = session, asked
        super().__init__(session, asked)

    def __str__(self) -> str:
        return f"the call {self.asked} of {self.session} was cut short, and is not made a second time"


class OutOfMemory(StrettoError):
    """A device had no memory for a step. `who`: the role; `doing`: what it did, as "while it generated"; `how`: the
    allocator's message."""

    def __init__(self, who: str, device: str, doing: str, how: str) -> None:
        self.who, self.device, self.doing, self.how = who, device, doing, how
        super().__init__(who, device, doing, how)

    def __str__(self) -> str:
        return f"{self.who} ran out of memory on {self.device} {self.doing}: {self.how}"


class TrainingDiverged(StrettoError):
    """Gradients were not finite for `max_bad_steps` optimizer steps in a row; the parameters are as before the first of
    them. `answers`: ids of the trajectories of the last such step, where known."""

    def __init__(self, step: int, in_a_row: int, answers: tuple[str, ...] = ()) -> None:
        self.step, self.in_a_row, self.answers = step, in_a_row, answers
        super().__init__(step, in_a_row, answers)

    def __str__(self) -> str:
        more = f" and {len(self.answers) - 8} more" if len(self.answers) > 8 else ""
        over = f" (the last over {', '.join(self.answers[:8])}{more})" if self.answers else ""
        found = f"{several(self.in_a_row, 'optimizer step')} in a row had NaN or infinite gradients{over}"
        return f"training step {self.step}: {found}; lower trainer.learning_rate, or resume from an earlier checkpoint"


class BoundViolated(StrettoError):
    """A guarantee of stretto, such as the staleness bound, was about to be broken by a bug, so the run stops."""


def described(error: OSError) -> str:
    """An OSError in one line: its file and the system's message. If it names no file, the innermost stretto function of
    its traceback follows the message."""
    place = f"{error.filename2 or error.filename}: " if error.filename else ""  # of a copy that fails, the new file
    ours = [
        f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("stretto.")
    ]
    asked = f" (asked for by {ours[-1]})" if ours and not place else ""
    return f"{place}{error.strerror or error}{asked}"


def folder_fault(path: Path) -> str:
    """Return why a path is no folder that can be looked into, such as "no such folder"; "" if it is one."""
    try:
        return "" if stat.S_ISDIR(path.stat().st_mode) else "is a file"
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL, or what no file name can hold
        return "no such folder"
    except OSError as error:  # unreadable, too long, a loop of links
        return f"cannot be looked into: {error.strerror}"


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """Context manager: an OSError raised in the block that names no file gets `place` as its file name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise


def nearest(name: str, allowed: Iterable[str], others: str = "allowed") -> str:
    """Text of the remedy for an unknown name: the most similar allowed name, or all allowed names, behind the word
    `others`, if none is similar; "" if nothing is allowed."""
    names = dict(zip(map(str.casefold, allowed := sorted(allowed)), allowed, strict=True))
    if close := difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.6):
        return f"did you mean {names[close[0]]!r}?"
    return f"{others}: " + ", ".join(allowed) if names else ""


def several(count: int, one: str, many: str = "") -> str:
    """Text for a number of things: "1 step", "2,048 steps". `many`: plural; "": that of `one`, with "s" or "ies"."""
    return f"{count:,} {one if count == 1 else many or (one[:-1] + 'ies' if one[-1] == 'y' else one + 's')}"


def harmless(text: str, ascii_only: bool = False) -> str:
    """Escape control characters, direction marks and lone surrogates, so that a text cannot control the terminal; with
    `ascii_only` all non-ASCII too. Line ends stay.

    >>> print(harmless("a\\x1b[2Jb\\u202ec"), harmless("→", ascii_only=True))
    a\\x1b[2Jb\\u202ec \\u2192
    """
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(
        one
        if one == "\n" or (one.isprintable() and (one.isascii() or not ascii_only))
        else one.encode("unicode_escape").decode()
        for one in text
    )
