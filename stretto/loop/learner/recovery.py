"""What a trainer's state is made of: its start, the last whole checkpoint, the batches since (docs/decisions/0002)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import StoreError
from stretto.core.records import Batch
from stretto.launch.recipe.recipe import Recipe, load_recipe, to_toml, validate
from stretto.store.folder.checkpoints import Checkpoint, Checkpoints, FileSeal, seal_files, verify_files
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_fact

RECIPE = "recipe"  #: the resolved recipe, in the ledger
START = "start"  #: the seals of every file that the run starts from, by folder, in the ledger


@dataclass(frozen=True)
class Recovery:
    """The run's own past, read whenever a trainer has to be brought back to it; every call reads whole files.

    Example: checkpoint of step 40, batches of 41 to 43: ``newest(43).step == 40``, and ``batch(41)`` comes next.
    """

    folder: RunFolder
    keep: int

    def newest(self, version: int) -> Checkpoint | None:
        """The newest whole checkpoint that is not past `version`; None when the run has to be trained from its start.

        Raises:
            StoreError: there are checkpoints and none is whole, or the start is not what it was.
        """
        if version or self.folder.policy(0).exists():
            check_start(self.folder)
        return Checkpoints(self.folder.checkpoints, self.keep).latest(version)

    def batch(self, step: int) -> Batch:
        """What step `step` was trained on.

        Raises:
            StoreError: it is not on record, with every token.
        """
        (batch,) = read_batches(self.folder.ledger, step - 1, step)
        return batch


def seal_start(ledger: Ledger, recipe: Recipe, policy: Path) -> None:
    """Put on record what the run starts from: the policy, which becomes version 0, and a reference of its own."""
    start = {"policy/v000000": seal_files(policy)}
    reference = recipe.algorithm.reference
    if reference is not None and reference.path is not None:
        start[reference.path] = seal_files(Path(reference.path))
    ledger.put(START, start)
    ledger.sync()


def check_start(folder: RunFolder) -> None:
    """Compare what the run started from with its seals, byte for byte; a run of an older format has none.

    Raises:
        StoreError: names the file that is missing or another, and what it was.
    """
    start = read_fact(folder.ledger, START, dict[str, dict[str, FileSeal]]) or {}
    for name, files in start.items():
        try:
            verify_files(folder.path / name, files, "the ledger")
        except StoreError as error:
            raise StoreError(f"{error}; bring the file back that the run started from") from error


def record_recipe(ledger: Ledger, recipe: Recipe) -> None:
    """Put the recipe that the run goes on with on record."""
    ledger.put(RECIPE, to_toml(recipe))


def recorded_recipe(folder: RunFolder, text: str | None) -> Recipe:
    """The recipe on record, whose text is `text`; that of the run folder where none is (an older format).

    Raises:
        RecipeError: this version of stretto cannot read it.
    """
    return load_recipe(folder.recipe) if text is None else validate(tomllib.loads(text), f"{folder.ledger}: {RECIPE}")
