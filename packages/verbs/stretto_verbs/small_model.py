"""`stretto.build_model`: a small model with random weights, to try things without a download; and the rule by which
it and `stretto.Trainer.export` replace a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from stretto.core.errors import UNREADABLE, ModelFolderError, Problem, described
from stretto.core.records import Record
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import check_replaceable
from stretto_verbs.arguments import FOLDER, WHOLE, check, checked

#: File of a written folder. No policy that is saved with this folder's tokenizer gets a copy of an ``*.index.json``.
_INDEX = "stretto.index.json"


def build_model(folder: str | Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a new model with random weights as a Hugging Face folder; returns the folder. Each character is one token.
    A model in the folder is replaced only if `build_model` wrote it.

    Example::

        folder = stretto.build_model("tiny", alphabet="0123456789", layers=1, hidden_size=32)
        print(stretto.Engine.load(folder).sample("3", max_tokens=4)[0].text)

    Args:
        seed: determines the random weights.
        **settings: keys of a recipe's section ``[model.build]``: `alphabet`, `layers`, `hidden_size`, `heads`, …

    Raises:
        ModelFolderError: the folder holds anything else than an unchanged result of `build_model`, or cannot be
            written.
        RecipeError: a setting is invalid.
    """
    check("build_model", folder=(folder, FOLDER), seed=(seed, WHOLE))
    config, place = checked(settings, "build_model", BuildConfig), Path(folder).expanduser()
    with replacing(place, "build_model"):
        build_policy(config, place, seed)
    return place


class _Index(Record, frozen=True):
    """The command that wrote a folder, and its files: size in bytes, and time of the last change in nanoseconds."""

    command: str
    files: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, command: str, folder: Path) -> _Index:
        """Make the index of all files in a folder that `command` has written."""
        known = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
        return cls(command, {name: (one.st_size, one.st_mtime_ns) for name, one in known.items() if name != _INDEX})


@contextmanager
def replacing(folder: Path, command: str) -> Iterator[None]:
    """Context manager: check that `folder` may be replaced, let the block write a model into it, and then record its
    files as written by `command`. A folder that is not empty is accepted only if the same command wrote it and nothing
    in it has changed since. Raises ModelFolderError if the folder has other contents, or cannot be written."""
    try:
        # Without the file, the folder may be a whole home directory, which is not walked.
        if (written := _written(folder)) is None or written != _Index.of(command, folder):
            check_replaceable(folder)  # it names what is no part of a model
            if folder.is_dir() and any(folder.iterdir()):
                found = f"holds a model that {command} has not written, or that was changed since; it would be lost"
                raise ModelFolderError([Problem(str(folder), found, "give a new folder, or remove this one")])
        yield
        (folder / _INDEX).write_bytes(msgspec.json.encode(_Index.of(command, folder)))
    except (OSError, UnicodeError, SafetensorError) as error:  # UnicodeError: a name that is no UTF-8
        found = f"cannot be written: {described(error) if isinstance(error, OSError) else error}"
        raise ModelFolderError([Problem(str(folder), found, "give another folder")]) from error


def _written(folder: Path) -> _Index | None:
    """Read the index that is in a folder; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index)
    except (OSError, *UNREADABLE):
        return None
