"""Promises: a tool gets each line of a run once, in order, whatever ends the process that follows; names are those of
docs/reference/metrics.md; steps that a resumed run does again stay as they were first; tables of completions are few
and short; an alarm is told once in a run.
"""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.store.series.metrics import SetEvaluationLine, rewind_metrics, rewind_samples
from stretto_report.outlets.follower import PORTION, ROW_STEPS, ROWS
from stretto_report.outlets.points import flat_recipe, point_of
from tests.outlets.recorded import Followed, collapsing, evaluation, sample, step

NAMES = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_the_numbers_of_a_step_have_the_names_of_the_page_of_metrics() -> None:
    point = point_of(step(7))
    assert (point.curve, point.step, point.seconds) == ("step", 7, 17.0)
    assert point.values["reward"] == 0.5
    sections = {name: value for name, value in point.values.items() if "/" in name}
    assert sections == {"trainer/loss": 0.25, "queues/buffered": 3.0, "busy/engine-0": 0.75}
    assert [name for name in point.values if f"| `{name.partition('/')[0]}` |" not in NAMES] == []


def test_an_evaluation_has_a_section_and_one_of_a_further_set_its_name() -> None:
    assert point_of(evaluation(4)).values["evaluation/accuracy"] == 0.125
    line = SetEvaluationLine(4, 4, 14.0, 4.0, 0.5, prompts=2, pass_at={4: 0.75}, ci95=(0.25, 0.75), name="aime")
    section = "evaluation_set/aime"
    found = point_of(line)
    assert found.curve == section
    assert found.values[f"{section}/pass_at/4"] == 0.75
    assert [found.values[f"{section}/ci95/{end}"] for end in ("low", "high")] == [0.25, 0.75]


def test_the_recipe_is_flat(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('seed = 1\n[trainer.lora]\nrank = 8\n[logging]\nto = ["wandb"]\n')
    assert flat_recipe(recipe) == {"seed": 1, "trainer.lora.rank": 8, "logging.to": '["wandb"]'}


def test_a_line_that_is_not_whole_waits(followed: Followed) -> None:
    followed.run.append(step(1))
    metrics = followed.run.folder.metrics
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[:40])
    followed.follower.advance()
    assert followed.got("step") == []
    metrics.write_bytes(whole)
    followed.follower.advance()
    assert followed.got("step") == [(1, 0.5)]


def test_a_slow_tool_gets_portions_and_keeps_those_that_it_has_taken(followed: Followed) -> None:
    """Out of order behind the second portion of three."""
    followed.run.steps(1, 2 * PORTION + 5)
    followed.fault_at_beat = 2
    with pytest.raises(ConnectionError):
        followed.follower.advance()
    assert (followed.cursor.points, followed.cursor.sent) == (2 * PORTION, {"step": 2 * PORTION})
    followed.fault.unlink()
    followed.restart()
    followed.follower.finish()
    assert [number for number, _ in followed.got("step")] == list(range(1, 2 * PORTION + 6))
    assert followed.beats == 3


def test_the_place_in_a_file_that_was_written_again_is_kept_though_nothing_in_it_is_new(followed: Followed) -> None:
    followed.run.steps(1, 3)
    followed.follower.advance()
    rewind_metrics(followed.run.folder.metrics, 2)
    followed.follower.advance()
    place, found = followed.cursor.metrics, followed.run.folder.metrics.stat()
    assert place is not None
    assert (place.identity[1], place.offset, place.number) == (found.st_ino, found.st_size, 2)


def test_a_line_that_cannot_be_read_is_skipped_and_said(followed: Followed, capsys: pytest.CaptureFixture[str]) -> None:
    followed.run.append(step(1))
    with followed.run.folder.metrics.open("a") as file:
        file.write("no JSON\n")
    followed.run.append(step(2))
    for _ in range(2):
        followed.follower.advance()
    assert followed.got("step") == [(1, 0.5), (2, 0.5)]
    assert followed.cursor.fault.startswith("metrics.jsonl: line 2 cannot be read")
    assert capsys.readouterr().err == f"{followed.cursor.fault}\n"


@pytest.mark.parametrize("restarts", [False, True], ids=["it goes on", "it begins anew"])
def test_steps_that_are_done_again_are_neither_doubled_nor_changed(followed: Followed, restarts: bool) -> None:
    """A crash behind step 5, of which the run knows step 3: steps 4 and 5 are done again."""
    run = followed.run
    run.steps(1, 5)
    followed.follower.advance()
    rewind_metrics(run.folder.metrics, 3)
    run.steps(4, 6, reward=0.75)
    if restarts:
        followed.restart()
    followed.follower.finish()
    assert followed.got("step") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.75)]


EVENTS = st.lists(
    st.sampled_from(["step", "evaluation", "advance", "restart", "outage", "rewind"]), min_size=1, max_size=25
)


@given(EVENTS)
@settings(max_examples=25, deadline=None)
def test_whatever_happens_each_curve_grows_and_has_every_step_once(events: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk takes milliseconds for each sync
        followed = Followed(Path(folder))
        done = 0
        for event in events:
            match event:
                case "step":
                    done += 1
                    followed.run.append(step(done))
                case "evaluation":
                    followed.run.append(evaluation(done))
                case "advance":
                    followed.follower.advance()
                case "restart":
                    followed.restart()
                case "outage":
                    followed.fault.touch()
                    try:
                        followed.follower.advance()
                    except ConnectionError:
                        followed.restart()
                    followed.fault.unlink()
                case "rewind":
                    done //= 2
                    rewind_metrics(followed.run.folder.metrics, done)
        followed.follower.finish()
        steps = [number for number, _ in followed.got("step")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= done
        evaluated = [number for number, _ in followed.got("evaluation")]
        assert evaluated == sorted(set(evaluated))
        assert followed.cursor.points == len(steps) + len(evaluated)


def test_a_table_has_the_newest_completions_and_the_next_one_comes_steps_later(followed: Followed) -> None:
    run = followed.run
    run.samples.append(sample(number) for number in range(20))
    run.append(step(1))
    followed.follower.advance()
    assert followed.got("table") == [(1, [f"3+8={number}" for number in range(20 - ROWS, 20)])]
    run.samples.append([sample(20)])
    run.append(step(ROW_STEPS))
    followed.follower.advance()
    followed.restart()  # what was in no table is read again
    run.append(step(1 + ROW_STEPS))
    followed.follower.advance()
    assert followed.got("table")[1:] == [(1 + ROW_STEPS, ["3+8=20"])]


def test_an_alarm_is_handed_on_once_at_its_first_step_whatever_is_done_again(followed: Followed) -> None:
    run = followed.run
    collapsing(run, 1, 19)
    followed.follower.advance()
    assert followed.got("alarm") == []  # of twenty steps there is a beginning and an end to compare
    collapsing(run, 20, 30)
    followed.follower.advance()
    assert followed.got("alarm") == [(19, "entropy collapse")]
    followed.restart()
    followed.follower.advance()
    rewind_metrics(run.folder.metrics, 15)
    collapsing(run, 16, 40)
    followed.follower.advance()
    followed.restart()
    followed.follower.finish()
    assert followed.got("alarm") == [(19, "entropy collapse")]
    assert followed.cursor.alarms == {"entropy collapse": 19}


def test_an_alarm_that_a_tool_did_not_take_is_handed_on_by_the_next_process(followed: Followed) -> None:
    collapsing(followed.run, 1, 25)
    followed.fault_at_beat = 2  # behind the points
    with pytest.raises(ConnectionError):
        followed.follower.advance()
    followed.fault.unlink()
    followed.restart()
    followed.follower.advance()
    assert followed.got("alarm") == [(19, "entropy collapse")]


def test_a_long_completion_is_cut_in_a_table(followed: Followed) -> None:
    followed.run.samples.append([msgspec.structs.replace(sample(1), completion="x" * 10**6)])
    followed.follower.finish()
    ((_, rows),) = followed.got("table")
    assert rows == ["x" * 20_000]


def test_a_sample_that_was_sent_is_in_no_table_again_after_a_resume(followed: Followed) -> None:
    followed.run.steps(1, 8)
    followed.run.samples.append([sample(number) for number in range(1, 9)])
    followed.follower.finish()
    rewind_samples(followed.run.folder.samples, 4)
    followed.run.samples.append([sample(number) for number in range(5, 11)])
    followed.restart()
    followed.follower.finish()
    rows = [text for _, table in followed.got("table") for text in table]  # type: ignore[attr-defined]
    assert rows == [f"3+8={number}" for number in range(1, 11)]
