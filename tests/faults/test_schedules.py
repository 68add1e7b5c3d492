"""Seeded schedules of a whole run on a virtual clock: delays, reorderings, duplicates, losses, kills of the conductor.

After every kill and at every end, an independent checker finds every law kept; a step that is done again comes to the
weights that it came to before. A seed that fails: ``python -m tests.faults.simulation SEED``. A hundred thousand are
played by `benchmarks.schedules`; the mistakes below are found within the first part of those that are played here.
"""

import shutil
from pathlib import Path

import pytest

from stretto.core.records import State, Trajectory
from stretto.rollout.prompts import Draw, PromptStream
from stretto.store.ledger.ledger import Ledger
from tests.faults.schedule import Schedule
from tests.faults.simulation import play, play_schedule

SCHEDULES = 200
PARTS = 4
ROUNDS = 8


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_every_law_is_kept_in_every_schedule(memory: Path, part: int) -> None:
    kills = 0
    for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
        folder = memory / str(seed)
        folder.mkdir()
        try:
            kills += play(seed, folder).kills
            shutil.rmtree(folder)
        except BaseException as error:
            error.add_note(f"seed {seed}; once more: python -m tests.faults.simulation {seed}")
            raise
    assert kills > SCHEDULES // PARTS // 4


def test_one_seed_is_one_schedule(memory: Path) -> None:
    worlds = []
    for name in ("first", "second"):
        (memory / name).mkdir()
        worlds.append(play(7, memory / name))
    assert (worlds[0].truth, worlds[0].kills) == (worlds[1].truth, worlds[1].kills)


def test_rounds_come_to_the_same_weights_whatever_dies_and_whenever(memory: Path) -> None:
    kills = 0
    for seed in range(ROUNDS):
        worlds = []
        for undisturbed in (True, False):
            folder = memory / f"{seed}-{undisturbed}"
            folder.mkdir()
            worlds.append(play_schedule(Schedule.of(seed).in_rounds(undisturbed=undisturbed), folder))
        assert worlds[0].truth == worlds[1].truth, f"seed {seed}"
        kills += worlds[1].kills
    assert kills > ROUNDS // 2


def lose_what_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptStream, "give_back", lambda stream, draw, failures=0: None)


def draw_everything_twice(patch: pytest.MonkeyPatch) -> None:
    take = PromptStream.take

    def twice(stream: PromptStream) -> Draw:
        take(stream)
        return take(stream)

    patch.setattr(PromptStream, "take", twice)


def write_between_two_changes_that_belong_together(patch: pytest.MonkeyPatch) -> None:
    settle = Ledger.settle

    def and_flush(ledger: Ledger, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        settle(ledger, id, state, reason, trajectory)
        ledger.flush()

    patch.setattr(Ledger, "settle", and_flush)


def forget_what_was_unfinished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.faults.simulation.read_unfinished", lambda path: [])


def play_many(folder: Path, seeds: int) -> None:
    for seed in range(seeds):
        (folder / str(seed)).mkdir()
        play(seed, folder / str(seed))


@pytest.mark.parametrize(
    "mistake",
    [
        lose_what_is_given_back,
        draw_everything_twice,
        write_between_two_changes_that_belong_together,
        forget_what_was_unfinished,
    ],
)
def test_a_mistake_is_found_within_one_part(memory: Path, mistake: object) -> None:
    assert callable(mistake)
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises(Exception, match=r".") as caught:
            play_many(memory, SCHEDULES // PARTS)
    assert not isinstance(caught.value, TypeError | AttributeError), caught.value
