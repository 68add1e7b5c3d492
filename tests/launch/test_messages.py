"""What a user is told: each mistake has its place, its value, and the way out; none is taken silently.

- Of a recipe: a kind that is left out, a key without its section, a plain value for a section or a list.
- Of folders: a name of the hub, pointers of git-lfs, a run that is not there.
- Of a reward: whether its module is missing, or one that it imports, or it is broken, and in which line.
- Of data: one wrong column is one line, however many rows it has.
- What would do nothing, or nothing good, is refused or told.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.core.errors import (
    DataError,
    ModelFolderError,
    RecipeError,
    RewardFunctionError,
    RoleDied,
    RoleFailed,
    RunFolderError,
    UserError,
)
from stretto.launch import train
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import load_recipe
from stretto.loop.records.reporter import SilentReporter
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.hf.inspection import POINTS, inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.spawn import FreshSpawner, RunningProcess, Spawn
from stretto.rewards.service.judging import load_reward
from stretto.store.run_folder import RunFolder
from stretto.weights.folder import SHARED
from stretto_app.extensions.preflight.notes import schedule_notes
from stretto_workflows.data.jsonl import read_rows, require
from tests.launch.running import TINY as TINY_RECIPE
from tests.launch.running import Laboratory
from tests.launch.test_recipe import SMALL, message, write
from tests.tiny_policy import TINY

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

#: Overrides of a small recipe, and what the one line about them ends with.
OVERRIDES = [
    ("steps=4", "override steps: unknown key; did you mean 'trainer.steps' or 'warm_start.steps'?"),
    ("step=4", "did you mean 'trainer.steps' or 'deadlines.step' or 'warm_start.steps'?"),
    ("group_size=4", "override group_size: unknown key; did you mean 'rollout.group_size'?"),
    ("learning_rate=1e-3", "did you mean 'trainer.learning_rate' or 'warm_start.learning_rate'?"),
    ("max_token=9", "did you mean 'sampling.max_tokens'"),
    ("algorithm.reference=0.1", "algorithm.reference: 0.1; a section with estimator, weight, into, path is needed, "
     "such as { weight = 0.1 }"),
    ("algorithm.reference=true", "True; a section with estimator, weight, into, path is needed"),
    ("algorithm.loss=3", "algorithm.loss: 3; one of decoupled_ppo, ppo, dual_clip, gspo, cispo, sapo, m2po, topr, "
     "dro, policy_gradient, or a section, is needed"),
    ("trainer=3", "override trainer: 3; a section is needed"),
    ("sampling.stop=END", """override sampling.stop: 'END'; a list is needed: ["END"]"""),
    ("trainer.learning_rate=10", "override trainer.learning_rate: 10; input should be less than or equal to 1"),
    ("evaluation.goal=0.9", "goal = 0.9 counts evaluations between the start and the end, and there are none; set "
     "every or minutes"),
    ("evaluation.patience=3", "patience = 3 counts evaluations between the start and the end, and there are none; set "
     "every or minutes"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "end"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_an_override_is_refused_with_the_way_out(tmp_path: Path, override: str, end: str) -> None:
    (told,) = message(write(tmp_path, SMALL), [override]).splitlines()
    assert told.endswith(end) or (end in told and end.startswith("did"))


@pytest.mark.parametrize(
    ("keys", "guess"),
    [
        ('file = "rows.jsonl"', "; its other keys are those of 'jsonl'"),
        ("operands_max = 4", "; its other keys are those of 'arithmetic'"),
        ("sources = []", "; its other keys are those of 'dataset'"),
        ("held_out = 3", ""),
        ("", ""),
    ],
)
def test_a_kind_left_out_is_named_and_guessed_where_one_has_the_keys(tmp_path: Path, keys: str, guess: str) -> None:
    path = write(tmp_path, f'[model]\npath = "policy"\n[task]\n{keys}\n[trainer]\nsteps = 3\n')
    assert message(path) == f"{path}: task.kind: missing; allowed: arithmetic, dataset, jsonl, programs{guess}"


def test_patience_may_count_the_evaluations_of_its_own_set(tmp_path: Path) -> None:
    chosen = (
        'evaluation={ patience = 3, best_of = "a", sets = [{ name = "a", every = %d, source = { data = "a.jsonl" } }] }'
    )
    load_recipe(write(tmp_path, SMALL), [chosen % 5])
    load_recipe(write(tmp_path, SMALL), ["evaluation.patience=3", "evaluation.minutes=1.0"])
    assert "there are none" in message(write(tmp_path, SMALL), [chosen % 0])


def test_a_warm_up_that_does_not_end_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    assert list(schedule_notes(load_recipe(path, ["trainer.warmup_steps=2"]))) == []
    (note,) = schedule_notes(load_recipe(path, ["trainer.warmup_steps=30"]))
    assert note == ("trainer.warmup_steps = 30 of trainer.steps = 3: the learning rate reaches only 2e-06, not 2e-05")


def test_mistakes_of_parts_model_and_data_are_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        make_plan(load_recipe(write(tmp_path, SMALL), ["rewards.function=nowhere:f", "engine.python=/nowhere"]))
    told = str(refused.value).splitlines()
    places = ["engine.python", "rewards.function", f"model.path: {tmp_path}/policy: no such folder", "task.file: "]
    assert [place for place in places if not any(line.startswith(place) for line in told)] == []


def test_a_name_of_the_hub_is_told_from_a_path_that_is_wrong(tmp_path: Path) -> None:
    path, needed = tmp_path / "Qwen" / "Qwen3-0.6B", "no such folder; a Hugging Face model folder is needed"
    with pytest.raises(ModelFolderError) as refused:
        inspect_model_folder(path)
    way_out = "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, and give that folder"
    assert str(refused.value) == f"{path}: {needed}; if Qwen/Qwen3-0.6B is meant as a hub name: {way_out}"
    path.parent.mkdir()
    with pytest.raises(ModelFolderError) as refused:
        inspect_model_folder(path)
    assert str(refused.value) == f"{path}: {needed}"


def test_a_name_in_the_working_directory_may_be_one_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("gpt2"), tmp_path / "gpt2"):
        with pytest.raises(ModelFolderError, match=r"^model\.path: .*gpt2: no such folder;.*`hf download gpt2 --local"):
            inspect_model_folder(path, "model.path")
    with pytest.raises(ModelFolderError, match=r"^policy: no such folder; a Hugging Face model folder is needed$"):
        inspect_model_folder("policy")


def test_a_folder_of_models_is_no_owner_on_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "models" / "Qwen3-0.6B"
    with pytest.raises(ModelFolderError) as refused:
        inspect_model_folder(path)
    assert str(refused.value) == f"{path}: no such folder; a Hugging Face model folder is needed"


def test_a_run_folder_in_place_of_a_model_or_a_recipe_is_told_what_it_holds(tmp_path: Path) -> None:
    for version in (0, 999_998, 1_000_000):
        (tmp_path / "first" / "policy" / f"v{version:06d}").mkdir(parents=True)
    (tmp_path / "first" / "ledger.sqlite").touch()
    run = tmp_path / "first"
    for load in (inspect_model_folder, load_tokenizer, load_policy):
        with pytest.raises(ModelFolderError) as refused:
            load(run)
        assert str(refused.value) == f"{run}: is a run folder; its newest policy is {run}/policy/v1000000"
    with pytest.raises(RecipeError) as wrong:
        load_recipe(run)
    told = f"a recipe is a TOML file; `stretto train --resume {run}` continues this run"
    assert str(wrong.value) == f"{run}: is a folder; {told}"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    build_policy(TINY, tmp_path / "model", seed=1)
    (tmp_path / "model" / name).write_text(POINTER)
    with pytest.raises(ModelFolderError) as refused:
        inspect_model_folder(tmp_path / "model")
    (told,) = str(refused.value).splitlines()
    assert told.endswith(f"{name}: {POINTS}")
    assert "git lfs pull" in POINTS


def test_a_run_that_is_not_there_is_refused_with_near_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"nosuch: does not exist; give a run folder$"):
        RunFolder.open("nosuch")
    for name in ("arithmetic-1", "first"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "ledger.sqlite").touch()
    with pytest.raises(RunFolderError, match="give a run folder, such as runs/"):
        RunFolder.open("nosuch")
    for near in ("runs/arithmetic-2", "arithmetic-1"):
        with pytest.raises(RunFolderError, match=f"{near}: does not exist; did you mean 'runs/arithmetic-1'"):
            RunFolder.open(near)
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.parametrize(
    ("lines", "found", "remedy"),
    [
        (None, "cannot import 'mine'", "give a module of the environment, of the recipe's folder or of"),
        ("import math\nimport nosuchpackage", "No module named 'nosuchpackage'",
         "mine.py:2 imports 'nosuchpackage', which is not in the environment of stretto: install it there"),
        ("import json\njson.loads('{')", "JSONDecodeError", "raised in {json}"),
        ("\n\ndef f(:", "SyntaxError", "mine.py:3"),
        ("x = 1\n\nraise ValueError('no key')", "ValueError: no key", "raised in {own}mine.py:3"),
    ],
    ids=["missing", "of another", "in a library", "syntax", "its own"],
)  # fmt: skip
def test_an_import_that_fails_says_whose_fault_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, found: str, remedy: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if lines is not None:
        (tmp_path / "mine.py").write_text(lines)
    with pytest.raises(RewardFunctionError) as refused:
        load_reward("mine:f")
    (problem,) = refused.value.problems
    assert found in problem.found
    assert remedy.partition("{")[0] in problem.remedy
    assert remedy.rpartition("}")[2] in problem.remedy


@pytest.mark.parametrize(("rows", "lines"), [(1, 1), (3, 3), (4, 1), (20, 1), (500, 1)])
def test_one_wrong_column_is_one_line_however_many_rows_have_it(tmp_path: Path, rows: int, lines: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1=", "answer": "2"}\n' * rows)
    with pytest.raises(DataError) as refused:
        read_rows(path, lambda row, number, place: require(row, ("prompt", "answer"), place))
    told = str(refused.value).splitlines()
    assert len(told) == lines
    more = f"; and {rows - 1} more rows" if rows > 3 else ""
    assert told[0] == f"{path}:1: no field 'prompt'; the row has: answer, question{more}"


@pytest.mark.parametrize(
    ("run_dir", "told"),
    [
        ("{}/$HOME/x", "only a shell replaces $HOME: write /"),
        ("~/x", "--run-dir: '~/x'; only a shell replaces ~: write /"),
        ("{}/there", "there: is not empty and holds no run (notes.txt, ...); give an empty or new folder"),
        ("{}/there/notes.txt/run", "there/notes.txt/run: cannot be created: Not a directory; give another folder"),
    ],
)
def test_a_dry_run_refuses_a_run_folder_as_a_start_does_and_makes_nothing(
    laboratory: Laboratory, tmp_path: Path, run_dir: str, told: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    words = ("train", TINY_RECIPE, "--run-dir", run_dir.format(tmp_path))
    laboratory.run(*words, "--dry-run").refused(told)
    assert len([*tmp_path.rglob("*")]) == 2
    laboratory.run(*words).refused(told)


def test_of_a_full_disk_that_of_the_file_is_named_however_full_others_are(tmp_path: Path) -> None:
    for place in (tmp_path, SHARED):
        told = train._room_needed(f"{place}/gone/x cannot be written: No space left on device", tmp_path)
        told_free = re.search(rf"; of the disk of {place} ([\d.]+) MiB are free", told)
        assert told_free is not None
        assert float(told_free[1]) == pytest.approx(shutil.disk_usage(place).free / 2**20, rel=0.05)


def test_the_error_of_a_role_that_finds_no_room_keeps_the_name_of_the_role(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(laboratory.cache))

    async def ends(*_: object) -> int:
        raise RoleFailed("trainer", f"{tmp_path}/run/x: No space left on device", 1)

    monkeypatch.setattr(train, "run", ends)
    with pytest.raises(RoleFailed, match=r"^trainer: .*No space left on device; of the disk of .*make room") as told:
        train.prepare(Path(TINY_RECIPE), (), tmp_path / "run", resume=False).train(SilentReporter())
    assert told.value.role == "trainer"


class DiskFull(FreshSpawner):
    """Starts in place of a role what finds no room, and does not say where."""

    async def start(self, spawn: Spawn) -> RunningProcess:
        return await super().start(replace(spawn, module="timeit", spec="raise OSError(28, 'No space left on device')"))


def test_a_role_that_finds_no_room_has_died_and_the_fullest_disk_is_told(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(laboratory.cache))
    once = ["deadlines.trainer_restarts=0", "deadlines.engine_restarts=0"]
    place = r"\(OSError: \[Errno 28\] .*; of the disk of (\S+) [\d.]+ MiB are free: .*; see the end of "
    with pytest.raises(RoleDied, match=place) as told:
        train.prepare(Path(TINY_RECIPE), once, tmp_path / "run", resume=False).train(SilentReporter(), DiskFull())
    fullest = min((tmp_path, SHARED, Path(tempfile.gettempdir())), key=lambda disk: shutil.disk_usage(disk).free)
    assert os.stat(re.findall(place, str(told.value))[0]).st_dev == fullest.stat().st_dev


def test_what_a_full_disk_needs_is_told_also_where_no_temporary_folder_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    told = train._room_needed("x: No space left on device", tmp_path)
    assert "make room there, and go on with `stretto train --resume" in told
