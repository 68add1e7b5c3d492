"""What `stretto train` checks before it takes a run folder, and before it goes on in one.

- A folder belongs to one run, one recipe and one set of questions.
- A run is gone on with by its folder alone.
- What the run started from, and its recipe, are what they were, or the run is refused with the file or the key.
- A broken checkpoint is passed over for the one before; steps are done again as they were done.
- A run that was killed before it had begun can be begun, or gone on with.
"""

import errno
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w

from stretto.core.errors import RunFolderError, StoreError
from stretto.launch.assemble.run import StartState, policies_to_go
from stretto.launch.assemble.supervised import copy_policy
from stretto.launch.recipe.recipe import load_recipe
from stretto.launch.recorded import DATA, FIELDS, STOPS
from stretto.launch.train import Prepared, prepare
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.recovery import seal_start
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.store.checkpoints import Checkpoints
from stretto.store.config import StoreConfig
from stretto.store.ending import ENDING, Ending, read_ending
from stretto.store.ledger.ledger import Ledger
from stretto.store.lock import is_held
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, MetricsLog
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto_app.extensions.preflight.dry_run import check
from stretto_report.reading.inspection import inspect_run
from tests.store.make import Make
from tests.tiny_policy import SMALL

pytestmark = pytest.mark.usefixtures("untried")


@pytest.fixture
def recipe(tmp_path: Path, policy: Path) -> Path:
    shutil.copytree(policy, tmp_path / "policy")
    rows(tmp_path, 6)
    text = '[model]\npath = "policy"\n[task]\nkind = "jsonl"\nfile = "rows.jsonl"\nheld_out = 1\n[trainer]\nsteps = 9\n'
    (tmp_path / "recipe.toml").write_text(text + "[sampling]\nmax_tokens = 8\n")
    return tmp_path / "recipe.toml"


def rows(folder: Path, count: int) -> None:
    lines = (json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(count))
    (folder / "rows.jsonl").write_text("".join(lines))


def begin(recipe: Path) -> Path:
    """A run folder as it stands when its roles are about to start."""
    run_dir = recipe.parent / "run"
    prepared = prepare(recipe, [], run_dir, resume=False)
    prepared.folder.release()
    path = getattr(prepared.plan.recipe.algorithm.reference, "path", None)
    with closing(Ledger(prepared.folder.ledger, StoreConfig())) as ledger:
        policy, loaded = recipe.parent / "policy", ["model.safetensors"]
        copy_policy(policy, prepared.folder.policy(0), lambda part: seal_start(ledger, part, path, loaded=loaded))
    return run_dir


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def go_on(recipe: Path, run_dir: Path, *overrides: str) -> Prepared:
    prepared = prepare(recipe, overrides, run_dir, resume=True)
    prepared.folder.release()
    return prepared


def checkpoint(run_dir: Path, step: int) -> Path:
    """A checkpoint of a step, with everything of that step on record."""
    model = load_policy(run_dir / "policy" / "v000000", attention=PACKED_ATTENTION)
    trainer = Trainer(model, TrainerConfig(), AlgorithmConfig(), version=step)
    record(run_dir, step)
    return Checkpoints(run_dir / "checkpoints").save(step, trainer.save_checkpoint)


def record(run_dir: Path, step: int) -> None:
    """The batches up to a step."""
    make = Make()
    with closing(Ledger(run_dir / "ledger.sqlite", StoreConfig())) as ledger:
        for number in range((ledger.last_step() or 0) + 1, step + 1):
            group = make.group(f"0.{number}.0", make.trajectory(f"0.{number}.0"))
            ledger.issue(group.id, make.prompt, 1, 0)
            ledger.buffer(group)
            ledger.commit_batch(make.batch(number, group))


def refusal(recipe: Path, run_dir: Path, *overrides: str) -> str:
    with pytest.raises(RunFolderError) as caught:
        go_on(recipe, run_dir, *overrides)
    return str(caught.value)


def test_a_run_goes_on_behind_its_last_batch_from_its_last_whole_checkpoint(recipe: Path) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 2)
    newest = checkpoint(run_dir, 4)
    record(run_dir, 5)
    assert go_on(recipe, run_dir).beginning == StartState(version=5, saved_step=4)
    damaged = min(newest.glob("shard-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes() + b" ")
    beginning = go_on(recipe, run_dir).beginning
    assert (beginning.version, beginning.saved_step) == (5, 2)
    assert [sentence.partition(": ")[0] for sentence in beginning.broken] == [str(damaged)]


def test_a_checkpoint_whose_batches_are_not_on_record_is_passed_over(recipe: Path) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 2)
    Checkpoints(run_dir / "checkpoints").save(4, lambda folder: None)  # the power went, and the ledger's end with it
    assert go_on(recipe, run_dir).beginning == StartState(version=2, saved_step=2)


def test_an_emptied_ledger_is_refused_before_its_policies_are_dropped(recipe: Path) -> None:
    Checkpoints((run_dir := begin(recipe)) / "checkpoints").save(4, lambda folder: None)
    (run_dir / "ledger.sqlite").write_bytes(b"")
    with pytest.raises(StoreError, match="has no step, and there is a checkpoint of step 4: bring the ledger"):
        go_on(recipe, run_dir)


def test_a_run_without_any_whole_checkpoint_is_refused_and_named(recipe: Path) -> None:
    run_dir = begin(recipe)
    (checkpoint(run_dir, 2) / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"no whole checkpoint is left: .*step-000002"):
        go_on(recipe, run_dir)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_start_that_is_not_what_it_was_is_refused_by_name(recipe: Path, steps: int) -> None:
    reference = recipe.parent / "reference"
    shutil.copytree(recipe.parent / "policy", reference)
    recipe.write_text(recipe.read_text() + '[algorithm.reference]\npath = "reference"\n')
    run_dir = begin(recipe)
    if steps:
        checkpoint(run_dir, steps)
    for file in (run_dir / "policy" / "v000000" / "model.safetensors", reference / "config.json"):
        whole = file.read_bytes()
        flip_a_bit(file)
        with pytest.raises(StoreError, match=rf"{file}: has checksum \w+, the ledger says \w+; bring the file back"):
            StartState.of(RunFolder.open(run_dir), 2)
        file.write_bytes(whole)
    assert go_on(recipe, run_dir).beginning.version == steps


def test_a_start_that_was_lost_is_refused_once_there_are_steps_and_made_again_before(recipe: Path) -> None:
    run_dir = begin(recipe)
    shutil.rmtree(run_dir / "policy" / "v000000")
    assert go_on(recipe, run_dir).beginning == StartState()
    record(run_dir, 1)
    with pytest.raises(StoreError, match=r"policy/v000000/[\w.]+: is missing; bring the file back"):
        go_on(recipe, run_dir)


def test_a_recipe_edited_in_the_run_folder_is_refused_with_every_difference(recipe: Path) -> None:
    run_dir = begin(recipe)
    own = run_dir / "recipe.toml"
    whole = own.read_text()
    own.write_text(whole.replace("learning_rate = 2e-05", "learning_rate = 0.5").replace("steps = 9", "steps = 12"))
    with pytest.raises(RunFolderError) as caught:
        prepare(run_dir, [], None, resume=True)
    assert str(caught.value).startswith(
        f"{run_dir}: trainer.learning_rate: was 2e-05 and is 0.5; a resumed run may change"
    )
    assert len(caught.value.problems) == 1
    go_on(recipe, run_dir, "trainer.steps=12")  # the recipe as it was, and a change that is allowed
    assert own.read_text() == whole.replace("steps = 9", "steps = 12")
    assert go_on(own, run_dir).steps == 12, "it is on record now"


def finished(recipe: Path) -> Path:
    """A run that has done its nine steps and has evaluated the last version."""
    run_dir = begin(recipe)
    checkpoint(run_dir, 9)
    MetricsLog(run_dir / "metrics.jsonl").append(EvaluationLine(9, 9, 1.0, 1.0, accuracy=0.5, prompts=1))
    end(run_dir, Ending("finished"))
    return run_dir


def end(run_dir: Path, ending: Ending) -> None:
    with closing(Ledger(run_dir / "ledger.sqlite", StoreConfig())) as ledger:
        ledger.put(ENDING, ending)


class Told(SilentReporter):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_a_run_with_all_steps_done_says_so_and_starts_and_writes_nothing(recipe: Path) -> None:
    run_dir, told = finished(recipe), Told()
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.suffix in (".jsonl", ".toml", ".json")}
    assert prepare(run_dir, (), None, resume=True).train(told) == 0
    assert told.sentences == [
        "all 9 steps of the run are done, and its last version is evaluated: nothing is left to do; trainer.steps=M "
        "with M > 9 continues it"
    ]
    assert {path: path.read_bytes() for path in before} == before
    assert not RunFolder(run_dir).log.exists()
    assert read_ending(run_dir / "ledger.sqlite") == Ending("finished")
    go_on(recipe, run_dir)  # the folder is free


def test_a_run_with_something_left_to_do_or_that_was_broken_off_goes_on(recipe: Path) -> None:
    run_dir = finished(recipe)
    for ending in (Ending("running"), Ending("stopped", "stopped by SIGINT"), Ending("failed", "no")):
        end(run_dir, ending)  # behind its last step
        assert not go_on(recipe, run_dir).beginning.done
    end(run_dir, Ending("finished", "accuracy 0.9 reached"))  # early
    assert go_on(recipe, run_dir, "evaluation.every=5").beginning.done
    assert not go_on(recipe, run_dir, "evaluation.goal=0.95", "evaluation.every=5").beginning.done
    end(run_dir, Ending("finished"))
    assert go_on(recipe, run_dir).beginning.done
    assert not go_on(recipe, run_dir, "trainer.steps=10").beginning.done
    assert go_on(recipe, run_dir, "trainer.steps=9").beginning.done
    for later in ("every=5", "samples=2", "patience=3 every=1"):  # no step is left to evaluate, or to end behind
        assert go_on(recipe, run_dir, *(f"evaluation.{one}" for one in later.split())).beginning.done
    rows = f"source={{data='{recipe.parent / 'rows.jsonl'}'}}"
    assert not go_on(recipe, run_dir, f"evaluation.sets=[{{name='more', {rows}}}]").beginning.done  # is owed
    assert not go_on(recipe, run_dir, "evaluation.keep_best=true").beginning.done
    (run_dir / "metrics.jsonl").unlink()
    assert not go_on(recipe, run_dir).beginning.done


def test_a_reward_that_was_edited_is_named_once_and_stays_on_record(recipe: Path) -> None:
    own, rest = recipe.parent / "my_reward.py", recipe.read_text()
    own.write_text("def judge(prompt, completion, answer):\n    return 1.0\n")
    recipe.write_text(f'{rest}[rewards]\nfunction = "my_reward:judge"\n')
    run_dir = begin(recipe)
    assert go_on(recipe, run_dir).beginning.changed == ()
    own.write_text(own.read_text().replace("1.0", "0.5"))
    beginning = go_on(recipe, run_dir).beginning
    (sentence,) = beginning.changed
    assert sentence.startswith("the source has changed since the run was started the last time: my_reward:judge (")
    assert sentence in beginning.sentences()
    assert go_on(recipe, run_dir).beginning.changed == ()
    assert inspect_run(run_dir).changed == (sentence,)


def test_a_resumed_run_ends_completions_as_it_began_whatever_ends_of_sequence_its_model_now_names(recipe: Path) -> None:
    before = go_on(recipe, run_dir := begin(recipe)).plan
    (recipe.parent / "policy" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    plan = go_on(recipe, run_dir).plan
    told = "the model names the tokens 1, 5 as ends of sequence, and the run began with 1: its completions end there"
    assert (plan.sampling, plan.notes) == (before.sampling, (*before.notes, told))
    forget(run_dir, STOPS)
    assert go_on(recipe, run_dir).plan.sampling.stop_token_ids == (1, 5)


@pytest.mark.parametrize("done", [False, True], ids=["a dry run", "a run that is done"])
def test_what_trains_nothing_records_no_ends_of_sequence_and_no_questions(recipe: Path, done: bool) -> None:
    run_dir = finished(recipe) if done else begin(recipe)
    kept = forget(run_dir, STOPS, DATA, FIELDS, "questions", "held out")
    prepare(recipe, [], run_dir, resume=True, write=done).folder.release()
    assert forget(run_dir) == kept


def forget(run_dir: Path, *facts: str) -> list[str]:
    """As in a run of an earlier version; returns the names of the facts that are left."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection, connection:
        connection.executemany("DELETE FROM meta WHERE name = ?", [(fact,) for fact in facts])
        return [name for (name,) in connection.execute("SELECT name FROM meta ORDER BY name")]


def test_a_changed_recipe_is_refused_with_every_difference(recipe: Path) -> None:
    run_dir = begin(recipe)
    lines = refusal(recipe, run_dir, "seed=2", "trainer.learning_rate=0.5", "trainer.steps=12").splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        f"{run_dir}: seed: was 1 and is 2",
        f"{run_dir}: trainer.learning_rate: was 2e-05 and is 0.5",
    ]
    assert "a resumed run may change only trainer.steps" in lines[0]


def test_fewer_steps_than_were_done_are_refused(recipe: Path) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 4)
    assert f"{run_dir}: trainer.steps: 3, and the run has done 4 steps" in refusal(recipe, run_dir, "trainer.steps=3")


def test_steps_that_are_done_again_keep_their_learning_rates(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("steps = 9\n", 'steps = 9\nschedule = "linear"\nwarmup_steps = 3\n'))
    run_dir = begin(recipe)
    record(run_dir, 3)
    go_on(recipe, run_dir, "trainer.steps=12")  # those of the warm-up do not depend on it
    go_on(recipe, run_dir, "trainer.steps=9")
    checkpoint(run_dir, 4)
    record(run_dir, 6)
    assert refusal(recipe, run_dir, "trainer.steps=12") == (
        f"{run_dir}: trainer.steps: was 9 and is 12; steps 5 to 6, which are repeated after the last "
        'checkpoint, would get other learning rates by trainer.schedule = "linear"; resume with trainer.steps=9: '
        "once the run ends, or is stopped by Ctrl-C, it has a checkpoint of its last step, and the number of steps "
        "can be changed"
    )
    assert "steps = 9" in (run_dir / "recipe.toml").read_text()
    checkpoint(run_dir, 6)
    assert go_on(recipe, run_dir, "trainer.steps=12").steps == 12


def test_a_constant_learning_rate_goes_on_for_as_many_steps_as_one_likes(recipe: Path) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 4)
    record(run_dir, 6)
    assert go_on(recipe, run_dir, "trainer.steps=12").steps == 12


def test_a_dry_run_refuses_what_a_resume_refuses(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = begin(recipe)
    before = (run_dir / "recipe.toml").read_text()
    with pytest.raises(RunFolderError, match="seed: was 1 and is 2"):
        check(run_dir, ["seed=2"], resume=True)
    check(run_dir, ["trainer.steps=12"], resume=True)
    assert "12 steps" in capsys.readouterr().out
    assert (run_dir / "recipe.toml").read_text() == before


def test_a_run_goes_on_with_its_model_and_its_data_in_another_place(recipe: Path) -> None:
    (other := recipe.parent / "policy" / "consolidated.safetensors").write_bytes(b"of another library")
    run_dir, moved = begin(recipe), recipe.parent / "moved"
    moved.mkdir()
    other.unlink()
    (recipe.parent / "policy").rename(moved / "policy")
    (recipe.parent / "rows.jsonl").rename(moved / "rows.jsonl")
    there = [f"model.path={moved / 'policy'}", f"task.file={moved / 'rows.jsonl'}"]
    assert go_on(recipe, run_dir, *there).beginning == StartState()
    build_policy(SMALL.model_copy(update={"hidden_size": 32}), moved / "other", seed=1)
    assert "moved/other' holds another model" in refusal(recipe, run_dir, f"model.path={moved / 'other'}", there[1])
    shutil.copytree(moved / "policy", moved / "retrained")
    flip_a_bit(moved / "retrained" / "model.safetensors")
    told = refusal(recipe, run_dir, f"model.path={moved / 'retrained'}", there[1])
    assert re.search(r"retrained' holds other weights \(their digest is \w{8}, on record is \w{8}\); give the", told)
    rows(moved, 7)
    assert "the training questions are not those of the run" in refusal(recipe, run_dir, *there)


def test_a_run_keeps_the_model_that_it_has_built(recipe: Path) -> None:
    built = tomli_w.dumps({"model": {"build": SMALL.model_dump(exclude_none=True)}})
    recipe.write_text(built + recipe.read_text().partition('path = "policy"\n')[2])
    told = refusal(recipe, begin(recipe), f"model.path={recipe.parent / 'policy'}")
    assert load_recipe(recipe, [f"model.path={recipe.parent / 'policy'}"]).model.build is None
    assert f": model: the run began with [model.build], and now has model.path = '{recipe.parent}/policy'; a" in told


def test_questions_in_another_file_are_compared_held_out_ones_and_those_of_a_set_by_its_name(recipe: Path) -> None:
    folder = recipe.parent
    apart = [row + "\n" for row in (folder / "rows.jsonl").read_text().splitlines()]
    (folder / "apart.jsonl").write_text("".join(apart[:2]))
    (folder / "same.jsonl").write_text("".join(apart[:2]))
    (folder / "other.jsonl").write_text("".join(apart[1:3]))
    recipe.write_text(recipe.read_text().replace("held_out = 1\n", 'held_out_file = "apart.jsonl"\n'))
    run_dir = begin(recipe)
    go_on(recipe, run_dir, f"task.held_out_file={folder / 'same.jsonl'}")
    go_on(recipe, run_dir, f"task.held_out_file={folder / 'same.jsonl'}", "evaluation.prompts=1")
    told = refusal(recipe, run_dir, f"task.held_out_file={folder / 'other.jsonl'}")
    assert f"{run_dir}: the held-out questions are not those of the run" in told

    def sets(**files: str) -> str:
        named = (f'{{name = "{name}", source = {{data = "{folder / file}.jsonl"}}}}' for name, file in files.items())
        return f"evaluation.sets=[{', '.join(named)}]"

    go_on(recipe, run_dir, sets(new="apart", more="apart"))
    go_on(recipe, run_dir, sets(more="same").replace("}}", "}, prompts = 1}"))
    told = refusal(recipe, run_dir, sets(more="same", new="other"))
    assert f"{run_dir}: the questions of evaluation set new are not those of the run" in told
    forget(run_dir, "evaluation sets")
    go_on(recipe, run_dir, sets(new="other"))
    assert "set new are not those of the run" in refusal(recipe, run_dir, sets(new="same")), "they are on record now"


def test_a_run_that_is_named_twice_is_refused(recipe: Path) -> None:
    run_dir = begin(recipe)
    twice = r"--resume: .*run is to be resumed, and --run-dir is .*other; name the run once"
    with pytest.raises(RunFolderError, match=twice):
        prepare(run_dir, [], run_dir.parent / "other", resume=True)
    prepare(run_dir, [], run_dir, resume=True).folder.release()


def test_a_run_writes_down_its_bound_and_its_questions_with_their_rows(recipe: Path) -> None:
    run_dir = begin(recipe)
    assert inspect_run(run_dir).staleness.bound == 4.0, "before its first step too"
    first = json.loads((run_dir / "questions.jsonl").read_text().splitlines()[0])
    assert first == {"id": "1", "prompt": "0+1=", "answer": "1", "row": f"{recipe.parent}/rows.jsonl:1", "source": ""}


def test_a_run_goes_on_by_its_folder_alone(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 4)
    recipe.unlink()
    monkeypatch.chdir(run_dir.parent)
    prepared = prepare(Path(run_dir.name), ["trainer.steps=12"], None, resume=True)
    prepared.folder.release()
    assert (prepared.path, prepared.steps, prepared.beginning.version) == (Path(run_dir.name), 12, 4)
    with pytest.raises(RunFolderError, match=f"{run_dir.parent}: holds no run"):
        prepare(run_dir.parent, [], None, resume=True)


def test_a_run_that_was_killed_before_its_ledger_is_begun_anew(recipe: Path) -> None:
    run_dir = begin(recipe)
    for file in (*run_dir.glob("*.sqlite*"), *run_dir.glob("*.json*")):
        file.unlink()
    (run_dir / "policy" / "v000000").rename(recipe.parent / "elsewhere")
    assert begin(recipe) == run_dir
    assert go_on(recipe, run_dir).beginning == StartState()


def test_a_run_that_was_killed_while_its_ledger_was_made_goes_on(recipe: Path) -> None:
    run_dir = begin(recipe)
    for file in run_dir.glob("*.sqlite*"):
        file.unlink()
    (run_dir / "ledger.sqlite").touch()
    assert go_on(recipe, run_dir).beginning == StartState()
    rows(recipe.parent, 7)
    assert "the training questions are not those of the run" in refusal(recipe, run_dir), "they are on record now"


def test_a_run_that_cannot_go_on_is_not_held(recipe: Path) -> None:
    run_dir = begin(recipe)
    manifest = checkpoint(run_dir, 2) / "manifest.json"
    manifest.rename(manifest.with_name("away"))
    with pytest.raises(StoreError):
        go_on(recipe, run_dir)
    manifest.with_name("away").rename(manifest)
    assert go_on(recipe, run_dir).beginning.version == 2


def test_a_run_without_a_folder_gets_one_by_recipe_and_time(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    prepared = prepare(recipe, [], None, resume=False)
    prepared.folder.release()
    assert prepared.path.parent == Path("runs")
    assert prepared.path.name.startswith("recipe-20")


def test_a_folder_that_could_not_be_filled_is_not_in_use(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run_dir = recipe.parent / "run"
    monkeypatch.setattr("stretto.launch.train.write_questions", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(recipe, [], run_dir, resume=False)
    assert not is_held(run_dir)
    with pytest.raises(OSError, match="No space left"):  # as full as before, and in nobody's use
        prepare(recipe, [], run_dir, resume=True)
    assert not is_held(run_dir)


def test_a_resumed_run_says_that_its_last_policy_goes_once_newer_ones_are_saved(recipe: Path) -> None:
    run_dir = begin(recipe)
    checkpoint(run_dir, 2)
    at_step_2 = go_on(recipe, run_dir)
    assert list(policies_to_go(at_step_2.plan, at_step_2.folder, 2)) == []  # none was saved yet
    at_step_2.folder.policy(2).mkdir()
    told = 'policy/v000002 stays until newer ones are saved: trainer.keep_versions = 1; "all" keeps every policy'
    assert list(policies_to_go(at_step_2.plan, at_step_2.folder, 2)) == [told]
    keeps = go_on(recipe, run_dir, "trainer.keep_versions=all")
    assert list(policies_to_go(keeps.plan, keeps.folder, 2)) == []
