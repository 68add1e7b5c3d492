"""A run from Python.

- Its steps come while it goes on; afterwards it is at hand as a run that was opened.
- Leaving the loop, and whatever is raised in it, stops the run: a checkpoint is there, no process is left.
- It works where an event loop runs already; a stopped run goes on.
- A policy is written with numbers as the model's were; what is trained and sampled is not rounded.
- A mistake raises the error of the command line with its text, and ends nothing else."""

import asyncio
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import stretto
from stretto import sections
from stretto.core.errors import StoreError
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy, save_policy, weights_dtype
from stretto.run import INSIDE, _MetricsReader
from stretto.store.series import lines as lines_module
from tests.api.conftest import living, script, tiny_recipe
from tests.api.workshop_rewards import length
from tests.launch.running import Laboratory, default_dispositions, wait_until
from tests.store.lines import step_line, write_lines
from tests.tiny_policy import TINY


def assert_nothing_is_left(run: stretto.Run, before: list[int]) -> None:
    assert not run.running
    assert living() == before


def test_a_run_has_its_steps_its_accuracy_and_its_trajectories(first_run: stretto.Run) -> None:
    assert not first_run.running
    assert [step.step for step in first_run.metrics] == [1, 2, 3]
    assert [line.version for line in first_run.evaluations] == [0, 3]
    assert first_run.accuracy == first_run.evaluations[-1].accuracy == first_run.summary().final_accuracy
    rows = list(first_run.trajectories())
    assert len(rows) == first_run.summary().trajectories.issued >= 3 * 2 * 4
    trained = [row for row in rows if row["trained_step"] is not None]
    assert len(trained) == 3 * 2 * 4
    assert {row["reward"] for row in trained} == {len(row["text"]) % 5 / 4 for row in trained}


@pytest.mark.long
def test_a_policy_is_written_as_the_model_was_and_nothing_else_is_rounded(inside: Path) -> None:
    half = inside / "half"
    build_policy(TINY, half, seed=1)
    save_policy(load_policy(half), half, half, dtype="bfloat16")
    recipe = tiny_recipe().model_dump(exclude_none=True) | {"model": {"path": str(half)}}
    runs = [
        stretto.train(recipe, rollout={"max_staleness": 0.0}, trainer={"save_dtype": dtype}).wait()
        for dtype in ("model", "float32")
    ]
    rounded, exact = ({name: run.folder / "policy" / name for name in ("v000000", "v000003")} for run in runs)
    assert [weights_dtype(path) for path in (*rounded.values(), *exact.values())] == [
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "float32",
    ]
    weights, whole = (load_file(paths["v000003"] / "model.safetensors") for paths in (rounded, exact))
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name].bfloat16()) for name in whole)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in whole.values())
    first, second = (
        [(row["prompt"], row["text"], row["reward"]) for row in run.trajectories() if row["state"] == "trained"]
        for run in runs
    )
    assert sorted(first) == sorted(second)
    states = [sorted((run.folder / "checkpoints").rglob("*.safetensors")) for run in runs]
    for one, other in zip(*states, strict=True):
        left, right = load_file(one), load_file(other)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert torch.bfloat16 not in {value.dtype for value in left.values()}


def test_an_opened_run_reads_the_same(first_run: stretto.Run) -> None:
    opened = stretto.open_run(first_run.folder)
    assert [step.step for step in opened] == [1, 2, 3]
    assert opened.metrics == first_run.metrics
    assert opened.wait().accuracy == first_run.accuracy
    opened.stop()
    with pytest.raises(stretto.RunFolderError, match="does not exist"):
        stretto.open_run("nowhere")


def test_steps_of_a_file_that_is_replaced_while_it_is_opened_are_all_read(
    first_run: stretto.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resumed run replaces it."""
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    lines = (first_run.folder / "metrics.jsonl").read_bytes()
    path.write_bytes(lines[: lines.index(b"\n", lines.index(b'"step":1')) + 1])
    other.write_bytes(lines)
    opened = lines_module.open_plain

    def replaced(*given: Any) -> int:
        file = opened(*given)
        if other.exists():
            other.rename(path)
        return file

    monkeypatch.setattr(lines_module, "open_plain", replaced)
    reader = _MetricsReader(path)
    assert [[step.step for step in reader.read()] for _ in range(3)] == [[1], [1, 2, 3], []]


@given(st.data())
def test_a_reader_has_every_line_of_a_file_that_is_rewritten_under_its_inode(data: st.DataObject) -> None:
    """A file system gives a new file the inode of one that is gone: a resumed run rewrites the file twice between two
    looks of a reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        reader, had = _MetricsReader(path), list[int]()
        for process in range(data.draw(st.integers(1, 3))):
            kept = had[: data.draw(st.integers(0, len(had)))]  # by the resume
            written = kept + [100 * process + at for at in range(data.draw(st.integers(1, 5)))]
            write_lines(path, [step_line(step) for step in written])
            found = [step.step for step in reader.read()]
            assert found == (written[len(had) :] if written[: len(had)] == had else written)
            had = written


def test_a_line_of_another_kind_is_an_error_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","step":[]}\n')
    with pytest.raises(StoreError, match="line 1 cannot be read"):
        _MetricsReader(path).read()


def test_a_file_may_be_a_link(tmp_path: Path) -> None:
    write_lines(tmp_path / "elsewhere", [step_line(1)])
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert [step.step for step in _MetricsReader(tmp_path / "metrics.jsonl").read()] == [1]


def test_a_recipe_in_code_is_evaluated_from_the_working_folder(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(inside))
    rows = [{"prompt": f"{number}+1=", "answer": f"{number + 1}"} for number in range(4)]
    (inside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = sections.JsonlTask(kind="jsonl", file="rows.jsonl", held_out=2)
    recipe = stretto.Recipe(**tiny_recipe().model_dump() | {"task": task, "rewards": {}})
    assert stretto.evaluate("~/model", recipe, **{"rewards.function": length}).prompts == 2


def test_leaving_the_loop_stops_the_run_and_it_can_go_on(inside: Path) -> None:
    """In a running event loop, as in a notebook."""
    before = living()

    async def cell() -> stretto.Run:
        run = stretto.train(tiny_recipe(), run_dir="runs/left", trainer={"steps": 100_000}, store={"sample_seconds": 1})
        for step in run:
            assert step.accuracy >= 0
            watched = stretto.open_run(run.folder)
            assert watched.running
            assert watched.metrics[0] == step
            break
        return run

    run = asyncio.run(cell())
    assert_nothing_is_left(run, before)
    done = run.metrics[-1].step
    again = stretto.train(run.folder, resume=True, trainer={"steps": done + 1})
    assert [step.step for step in again] == list(range(1, done + 2))
    assert again.summary().trajectories.trained == (done + 1) * 2 * 4


def test_ctrl_c_stops_the_run_and_is_raised(inside: Path) -> None:
    before, seen = living(), list[int]()

    def look(step: stretto.StepMetrics) -> None:
        seen.append(step.step)
        signal.raise_signal(signal.SIGINT)

    with default_dispositions(), pytest.raises(KeyboardInterrupt):
        stretto.train("recipe.toml", run_dir="runs/callback", on_step=look, trainer={"steps": 100_000})
    assert seen == [1]
    assert_nothing_is_left(stretto.open_run("runs/callback"), before)


_SCRIPT = """
import stretto

def by_length(prompt, completion, answer):
    return len(completion) % 5 / 4

if __name__ == "__main__":
    run = stretto.train("recipe.toml", reward=by_length, run_dir="runs/script", **{"trainer.steps": 100_000})
    for step in run:
        print(step.step, flush=True)
"""


def test_a_script_s_own_function_judges_and_a_killed_script_leaves_no_run(inside: Path) -> None:
    (inside / "script.py").write_text(_SCRIPT)
    process = script(inside / "script.py")
    wait_until(lambda: "1\n" in process.said()[0] or process.poll() is not None, "the first step")
    assert process.said()[0].startswith("1\n"), process.said()[1]
    process.kill()
    process.wait(30)
    run = stretto.open_run("runs/script")
    wait_until(lambda: not run.running, "the end of the run")
    assert 'function = "script:by_length"' in (run.folder / "recipe.toml").read_text()
    assert list((run.folder / "checkpoints").iterdir())  # it has stopped as if asked to


def test_mistakes_have_the_text_of_the_command_line(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Laboratory(inside, inside, warm=True).run("train", "recipe.toml", "trainer.step=5").err
    with pytest.raises(stretto.RecipeError) as refused:
        stretto.train("recipe.toml", trainer={"step": 5})
    assert told == f"stretto: {refused.value}\n"
    assert "did you mean 'steps'?" in told
    with pytest.raises(
        stretto.RecipeError, match=r"Recipe: rollout\.groupsize: unknown key; did you mean 'group_size'"
    ):
        stretto.Recipe(**tiny_recipe().model_dump() | {"rollout": {"groupsize": 3}})
    with pytest.raises(stretto.RecipeError, match=r"override 'trainer\.steps\.x': steps is a value"):
        stretto.train("recipe.toml", **{"trainer.steps.x": 1})  # type: ignore[arg-type]
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(stretto.RecipeError, match='under if __name__ == "__main__"'):
        stretto.train("recipe.toml")


def test_what_only_the_process_of_the_run_can_find_is_raised_here(inside: Path) -> None:
    before = living()
    with pytest.raises(stretto.RewardFunctionError, match="no built-in reward is called 'lenght'"):
        stretto.train("recipe.toml", rewards={"function": "lenght"})
    with pytest.raises(stretto.ModelFolderError, match="no such folder"):
        stretto.evaluate("no-model", tiny_recipe(), evaluation={"prompts": 4})
    assert living() == before
