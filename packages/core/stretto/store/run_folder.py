"""The run folder: the files of one run, a lock that one process at a time holds, and the origin of a branch, which has
steps of a run that `stretto replay` trained again.

recipe.toml versions.json machine.json      the settings, the libraries, the machine
kernels.json                                the matmul kernels that its roles use
rewards.json                                facts that the reward reports: the level of its sandbox
log.txt logs/<role>.txt                     logs of the run and of each role
metrics.jsonl spans.jsonl                   measurements
questions.jsonl                             prompts and gold answers, for the export
samples.jsonl held_out.jsonl                sampled completions: some of the training's, all of each evaluation's
ledger.sqlite                               the state of every trajectory
tokens/step-000012.safetensors              ratio, advantage and outcome of each token in a training step
prediction.json                             the prediction of `stretto plan --run` for the run
policy/v000012/ checkpoints/step-000040/    policies and checkpoints
policy/best/ best.json                      the policy of the best evaluation, if it is kept
plots/*.png alarms.bin                      plots; what the alarms remember of the steps
outlets/<tool>.json                         how far each tool of [logging] has received the run
lock                                        the process that writes here now
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from stretto.core.errors import Problem, RunFolderError, folder_fault
from stretto.core.machine import cores, gpus, processor
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.files import identity, sweep, write_atomically

BRANCHES = "branches"  #: sub-folder of a run with the branches that were given no folder
ORIGIN = "branch.json"  #: name of the file in a branch's folder that holds its `Branch`

#: Sections that a replay may change: those that decide what a batch does to the weights.
CHANGEABLE = ("algorithm", "trainer")


class Branch(Record, frozen=True):
    """``branch.json``: the origin of a branch, a run folder with steps `first_step` + 1 to `last_step` of a run that
    `stretto replay` trained again. `changes`: settings that differ from the run: key: both values, as text."""

    run: str  # path of the run's folder
    first_step: int  # trained after this step
    last_step: int
    changes: dict[str, str]

    def __str__(self) -> str:
        return f"a replay of {self.run} from step {self.first_step}"


class ExportedQuestion(Record, frozen=True):
    """One line of ``questions.jsonl``: a prompt and its gold answer. `row`: its place in the data (``FILE:LINE``);
    None: it is not from a file. `source`: name of its source; "": it has none."""

    id: str
    prompt: str
    answer: str
    row: str | None = None
    source: str = ""


_INNER = ("logs", "policy", "checkpoints", "plots")
_RECIPE, _PREDICTION = "recipe.toml", "prediction.json"
#: Files that do not hinder a new run: left by a run that ended before it had a ledger, or by `stretto plan --run`.
_FREE_NAMES = {lock.NAME, "log.txt", "logs", _PREDICTION}
_RESERVED = 2  # descriptors: `shutil.rmtree` has a folder open twice
_HALF_A_RECIPE = re.compile(r"\.recipe\.toml\.\d+\.part")


class RunFolder:
    """The paths of one run's files. `create` and `resume` also lock the folder; `held`: descriptor of the lock, None
    without one. As a context manager, the folder is released at the end of the block.

    Example::

        with RunFolder.create("runs/first") as folder:
            folder.write("recipe.toml", resolved)
            ledger = Ledger(folder.ledger, StoreConfig())
    """

    def __init__(self, path: Path, held: int | None = None) -> None:
        self.path, self._lock = path, held
        self._reserve: list[int] = []
        self.recipe, self.ledger, self.kernels = path / _RECIPE, path / "ledger.sqlite", path / "kernels.json"
        self.log, self.metrics, self.spans = path / "log.txt", path / "metrics.jsonl", path / "spans.jsonl"
        self.questions, self.samples = path / "questions.jsonl", path / "samples.jsonl"
        self.held_out, self.prediction = path / "held_out.jsonl", path / _PREDICTION
        self.gateway, self.tokens, self.outlets = path / "gateway", path / "tokens", path / "outlets"
        self.logs, self.policies, self.checkpoints, self.plots = (path / inner for inner in _INNER)

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """Create the folder of a new run, with its sub-folders, and lock it.

        Raises:
            RunFolderError: the folder holds another run or other files, is in use, or cannot be written.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(folder, f"cannot be created: {error.strerror}", "give another folder") from error
        with cls._locked(folder) as run:
            if (problem := _why_not_new(folder)) is not None:
                raise RunFolderError([problem])
            sweep([folder])
            for inner in _INNER:
                (folder / inner).mkdir(exist_ok=True)
        return run

    @staticmethod
    def check_new(path: str | Path) -> None:
        """Check that `create` could make this folder, without making anything. Raises RunFolderError as `create`."""
        folder = place = Path(path)
        found: os.stat_result | None = None
        while found is None:
            try:
                found = place.stat()
            except FileNotFoundError:
                if place.is_symlink():  # to nothing
                    why = f"cannot be created: {os.strerror(errno.EEXIST)}"
                    raise _refused(folder, why, "give another folder") from None
                place = place.parent
            except OSError as error:
                raise _refused(folder, f"cannot be created: {error.strerror}", "give another folder") from error
        if not stat.S_ISDIR(found.st_mode):
            why = f"cannot be created: {os.strerror(errno.EEXIST if place == folder else errno.ENOTDIR)}"
            raise _refused(folder, why, "give another folder")
        try:  # permissions alone do not say it: root has all of them in /proc, where nothing can be made
            tempfile.TemporaryFile(dir=place).close()  # without a name, if the file system can
        except OSError as error:
            if place == folder:
                raise lock.unwritable(folder, error) from error
            raise _refused(folder, f"cannot be created: {error.strerror}", "give another folder") from error
        if place == folder:
            lock.check_free(folder)
            if (problem := _why_not_new(folder)) is not None:
                raise RunFolderError([problem])

    @classmethod
    @contextlib.contextmanager
    def _locked(cls, folder: Path) -> Iterator[Self]:
        """Lock the folder. If the block fails, the lock is released; an OSError becomes a RunFolderError."""
        run = cls(folder, held := lock.acquire(folder))
        with contextlib.ExitStack() as undo:
            undo.callback(run.release)
            try:
                for _ in range(_RESERVED):
                    run._reserve.append(os.dup(held))
                yield run
            except OSError as error:
                raise lock.unwritable(folder, error) from error
            undo.pop_all()

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """Lock the folder of a run that has ended, to continue the run. Half-written files are removed.

        Raises:
            RunFolderError: the folder holds no run, its run is still running, or the folder cannot be written.
        """
        folder = cls.open(path).path
        with cls._locked(folder) as run:
            sweep([folder, run.tokens, *(folder / inner for inner in _INNER)])
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the folder of a running, finished or dead run for reading, without a lock.

        Raises:
            RunFolderError: the folder does not exist, or holds no run.
        """
        folder = Path(path)
        if fault := why_no_folder(folder):
            raise _refused(folder, fault, _runs_beside(folder))
        if not (folder / "ledger.sqlite").is_file():
            raise _refused(folder, "holds no run (no ledger.sqlite)", _runs_within(folder))
        return cls(folder)

    def is_ours(self) -> bool:
        """Whether this object holds the lock, and its lock file is still the one at `path`: neither the file nor the
        folder was moved away or replaced."""
        if self._lock is None:
            return False
        held = os.fstat(self._lock)
        return identity(self.path / lock.NAME) == (held.st_dev, held.st_ino)

    @property
    def mark(self) -> str:
        """Id of the run, unique on this machine and the same after a resume: device and inode of the lock file. "" if
        this object holds no lock."""
        if self._lock is None:
            return ""
        held = os.fstat(self._lock)
        return f"{held.st_dev}-{held.st_ino}"

    def free_reserve(self) -> None:
        """Close the two descriptors that a locked folder keeps in reserve: this process can then remove other folders
        although it has as many files open as it may."""
        while self._reserve:
            os.close(self._reserve.pop())

    def held_until(self, written: Future[Any]) -> None:
        """Keep the lock, if it is held, also after `release`, until the work of a thread that writes here has ended
        (`written`), or the process."""
        if self._lock is not None:
            held = self._reserve.pop() if self._reserve else os.dup(self._lock)  # those in reserve are the lock's too
            written.add_done_callback(lambda _: os.close(held))

    def release(self) -> None:
        """Release the lock, if it is held."""
        self.free_reserve()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, name: str, text: str) -> None:
        """Write the text file `name` of the folder, completely or not at all, and sync it to disk.

        Raises:
            OSError: the file cannot be written, or the folder is not locked by this object any more (`is_ours`).
        """
        if not self.is_ours():
            raise FileNotFoundError(errno.ENOENT, "the run folder was moved or removed", str(self.path))
        write_atomically(self.path / name, text.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def role_log(self, role: str) -> Path:
        return self.logs / f"{role}.txt"

    def policy(self, version: int) -> Path:
        """Path of the Hugging Face folder of the policy `version`: ``policy/v000012`` for version 12."""
        return self.policies / f"v{version:06d}"

    def saved_policies(self) -> list[tuple[int, Path]]:
        """List the policy folders as (version, path), oldest first; by number, since names have six digits or more."""
        named = [(path.name.removeprefix("v"), path) for path in self.policies.glob("v*")]
        return sorted((int(number), path) for number, path in named if number.isdecimal())


def why_no_folder(path: Path) -> str:
    """Say why a path that should be a folder is none, such as "does not exist"; "" if it is a folder."""
    fault = folder_fault(path)
    return {"is a file": "is no folder", "no such folder": "does not exist"}.get(fault, fault)


def _why_not_new(folder: Path) -> Problem | None:
    """Return why a new run cannot use the folder; None if it can.

    A folder with a ledger holds a run. A recipe beside the sub-folders was left by a run that was killed before it had
    a ledger, and may be overwritten. Any other file is not overwritten, since it may belong to someone.
    """
    if (folder / "ledger.sqlite").exists():
        return Problem(str(folder), "holds another run", "resume it with --resume, or give another --run-dir")
    killed = all((folder / inner).is_dir() for inner in _INNER)
    strange = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in _FREE_NAMES
        and not (path.is_dir() and not any(path.iterdir()))
        and not (killed and (path.name == _RECIPE or _HALF_A_RECIPE.fullmatch(path.name)))
    )
    if strange:
        return Problem(str(folder), f"is not empty and holds no run ({strange[0]}, ...)", "give an empty or new folder")
    return None


def _refused(folder: Path, found: str, remedy: str) -> RunFolderError:
    return RunFolderError([Problem(str(folder), found, remedy)])


def _runs_beside(folder: Path) -> str:
    """Advice for a path without a run: names the run folder beside it, or in ``runs`` beside it, with a similar name,
    or else the newest one, if there are any."""
    places = {folder.parent, folder.parent / "runs"}
    try:
        runs = {path.parent.name: path.parent for place in places for path in place.glob("*/ledger.sqlite")}
    except OSError:  # the path is too long, or a loop of links
        runs = {}
    if not runs:
        return "give a run folder"
    near = difflib.get_close_matches(folder.name, sorted(runs), n=1)
    newest = max(runs.values(), key=lambda path: _written(path / "ledger.sqlite"))
    return f"did you mean {str(runs[near[0]])!r}?" if near else f"give a run folder, such as {newest}"


_SHOWN_RUNS = 8


def _runs_within(folder: Path) -> str:
    """Advice for a folder without a run: names the run folders in it, or in ``runs`` in it, the newest first; at most
    eight."""
    try:
        ledgers = [path for inner in ("*", "runs/*") for path in folder.glob(f"{inner}/ledger.sqlite")]
    except OSError:  # it cannot be listed
        ledgers = []
    if not ledgers:
        return "give a folder that `stretto train` created"
    runs = [str(path.parent) for path in sorted(ledgers, key=_written, reverse=True)]
    more = f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
    return f"give one of those in it: {', '.join(runs[:_SHOWN_RUNS])}{more}"


def _written(file: Path) -> float:
    """Time at which a file was last written, in seconds; 0 if it is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "numpy", "pydantic", "uvicorn")


class Machine(Record, frozen=True):
    """Hardware and system of a machine. Example: ``Machine(system="Linux 6.1", processor="AMD EPYC 9B14", cores=2,
    memory_gib=24.0, accelerators=())``"""

    system: str
    processor: str
    cores: int
    memory_gib: float
    accelerators: tuple[str, ...]


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of stretto and of the libraries that influence its numbers, by name. Libraries
    that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in ("stretto", *_LIBRARIES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> Machine:
    """Describe this machine. `cores` counts those that this process may use; `accelerators` are the visible NVIDIA
    GPUs."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=processor(),
        cores=cores(),
        memory_gib=round(pages * page / 2**30, 1),
        accelerators=tuple(f"{gpu.name}, {gpu.memory >> 20} MiB" for gpu in gpus()),
    )
