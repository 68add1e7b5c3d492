"""Promises of several ranks: 1, 2 and 3 of them give the same losses, and the same weights, to rounding;
so do two with a critic, a reference, adapters and the rest; the gradients of one batch agree for
some losses; each rank holds only its part; all of them measure and decide alike. A checkpoint is written while the
training goes on, and any number of ranks goes on from it.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from stretto.core.errors import StoreError
from stretto.store.series.tokens import TokenOutcome
from stretto.trainer import checkpoint
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import RankLost
from stretto.trainer.parallel.ranks import ALONE
from stretto.trainer.roles.rank_group import RankGroup
from stretto.trainer.spec import TrainerSpec
from tests.launch.warm import MARK, WarmCommand
from tests.tolerances import after_adam, assert_close
from tests.trainer.rank_runs import LOSSES, PLAYED, SAMPLING, SCENARIOS, trainer_of
from tests.trainer.tiny import BACKWARD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank of every training saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = WarmCommand([str(folder)], folder, {**os.environ, MARK: uuid4().hex}, "tests.trainer.rank_runs")
    try:
        said = "".join(command.communicate(200))
    finally:
        command.kill()
    assert command.returncode == 0, said
    return folder


def seen(folder: Path, count: int, scenario: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{count}-{scenario}-{rank}.pt", weights_only=True)
    return found


@pytest.mark.parametrize(("count", "scenario"), [(count, name) for count, names in PLAYED.items() for name in names])
def test_several_ranks_train_what_one_does(folder: Path, count: int, scenario: str) -> None:
    one, several = seen(folder, 1, scenario), seen(folder, count, scenario)
    steps = SCENARIOS[scenario].steps
    tolerance = after_adam(steps * SCENARIOS[scenario].trainer.get("minibatches", 2), BACKWARD)
    assert len(one["metrics"]) == steps
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == {name: pytest.approx(value, rel=tolerance, abs=tolerance) for name, value in theirs.items()}
    for name, parameter in one["weights"].items():
        torch.testing.assert_close(several["weights"][name], parameter, rtol=0, atol=tolerance, msg=name)
    assert several["skipped"] == one["skipped"]


@pytest.mark.parametrize(("count", "scenario"), [(count, name) for count, names in PLAYED.items() for name in names])
def test_all_ranks_measure_and_decide_alike(folder: Path, count: int, scenario: str) -> None:
    first, *others = (seen(folder, count, scenario, rank) for rank in range(count))
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert other["skipped"] == first["skipped"]
        assert all(torch.equal(other["weights"][name], p) for name, p in first["weights"].items())


@pytest.mark.parametrize(("count", "scenario"), [(3, "few"), (2, "small"), (2, "selection"), (2, "adapters")])
def test_every_rank_has_what_became_of_all_tokens(folder: Path, count: int, scenario: str) -> None:
    one = seen(folder, 1, scenario)["tokens"]
    every = [seen(folder, count, scenario, rank) for rank in range(count)]
    steps = SCENARIOS[scenario].steps
    tolerance = after_adam(steps * SCENARIOS[scenario].trainer.get("minibatches", 2), BACKWARD)
    for several in every:
        assert [list(step) for step in several["tokens"]] == [list(step) for step in one]
        for ours, theirs in zip(several["tokens"], one, strict=True):
            for id, columns in theirs.items():
                torch.testing.assert_close(
                    ours[id][:, :3], columns[:, :3], rtol=tolerance, atol=tolerance, equal_nan=True
                )
        outcomes = torch.cat(list(several["tokens"][0].values()))[:, 3].int()
        counted = several["metrics"][0]["clip_fraction"] * int((outcomes & TokenOutcome.IN_LOSS > 0).sum())
        assert int((outcomes & TokenOutcome.BOUNDED > 0).sum()) == round(counted)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradients_of_one_batch_are_those_of_one_process(folder: Path, loss: str) -> None:
    one, two = seen(folder, 1, loss)["moments"], seen(folder, 2, loss)["moments"]
    assert one.keys() == two.keys()
    assert_close([two[name] for name in one], list(one.values()), BACKWARD)
    assert max(float(moment.abs().max()) for moment in one.values()) > 1e-4  # there is something to compare


def test_a_step_that_is_not_finite_on_one_rank_is_taken_by_none(folder: Path) -> None:
    for count in (1, 2):
        found = seen(folder, count, "poisoned")
        assert [update["bad_steps"] for update in found["metrics"]] == [0, 1]
        assert [bool(names) for names in found["skipped"]] == [False, True]


def test_each_rank_holds_its_part_of_the_parameters(folder: Path) -> None:
    for count, (scenario, *_) in PLAYED.items():
        whole = seen(folder, 1, scenario)["own"]
        parts = [seen(folder, count, scenario, rank)["own"] for rank in range(count)]
        assert sum(parts) == whole
        assert max(parts) < 1.4 * whole / count  # a row of a matrix is never divided, and 13 rows not evenly


@pytest.mark.parametrize("name", ["1-3-apart", "1-3-2", "1-3-2-1"])
def test_a_checkpoint_is_gone_on_from_by_another_number_of_ranks(folder: Path, name: str) -> None:
    """Optimizer and critic included, whether or not all ranks see the folder: `1-1` is one rank that goes on from its
    own checkpoint."""
    steps = len(re.findall(r"\d", name))
    straight, other = (
        torch.load(folder / f"{path}.pt", weights_only=True)["weights"] for path in ("-".join("1" * steps), name)
    )
    for parameter, value in straight.items():
        torch.testing.assert_close(other[parameter], value, rtol=0, atol=after_adam(steps * 2, BACKWARD), msg=parameter)


def test_a_checkpoint_that_is_read_by_other_ranks_gives_the_same_weights(folder: Path) -> None:
    """To the last bit: what is saved is what was trained, however it was divided and sent."""
    for name in ("1", "1-3-apart", "1-3-2"):
        trainer = trainer_of(SCENARIOS["critic"], ALONE)
        trainer.load_checkpoint(folder / name)
        trained = torch.load(folder / f"{name}.pt", weights_only=True)["weights"]
        assert all(torch.equal(weight, trained[key]) for key, weight in trainer.full_parameters())


def test_moments_in_host_memory_give_the_same_weights(folder: Path) -> None:
    """To the last bit, of two ranks that go on from one checkpoint: `1-3-2` has its moments there."""
    host, device = (
        torch.load(folder / f"{name}.pt", weights_only=True)["weights"] for name in ("1-3-2", "1-3-2-device")
    )
    assert all(torch.equal(weight, device[key]) for key, weight in host.items())


def test_each_rank_writes_its_part_of_a_checkpoint(folder: Path) -> None:
    for name, count in (("1", 1), ("1-3-2", 2)):
        assert len(list((folder / name).glob("shard-*.safetensors"))) == count
        assert len(list((folder / name / "critic").glob("shard-*.safetensors"))) == count


def test_rank_0_writes_all_where_the_others_do_not_see_the_folder(folder: Path) -> None:
    for part in (folder / "1-3-apart", folder / "1-3-apart" / "critic"):
        files = sorted(path.name.partition("-model")[0] for path in part.iterdir() if path.is_file())
        assert files == ["shard-00001", "trainer.json"]
    assert not (folder / "not-there").exists()


def test_a_snapshot_in_several_files_is_what_training_has_not_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 4096)
    scenario = SCENARIOS["critic"]
    trainer = trainer_of(scenario, ALONE)
    trainer.train(scenario.batch(0))
    before = {name: weight.clone() for name, weight in trainer.full_parameters()}
    write = trainer.snapshot()
    trainer.train(scenario.batch(1))
    write(tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) > 3
    again = trainer_of(scenario, ALONE)
    again.load_checkpoint(tmp_path)
    assert again.version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in again.full_parameters())
    assert not all(torch.equal(weight, before[name]) for name, weight in trainer.full_parameters())


def test_what_the_system_says_of_a_checkpoint_that_it_does_not_take_is_one_line(tmp_path: Path) -> None:
    trainer = trainer_of(SCENARIOS["paper"], ALONE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as on a disk that is full behind 4 KiB
    try:
        with pytest.raises(StoreError) as refused:
            trainer.save_checkpoint(tmp_path / "v0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(refused.value) == f"{tmp_path / 'v0'}: the checkpoint cannot be written: File too large"


def test_a_checkpoint_without_one_ranks_part_is_refused(folder: Path, tmp_path: Path) -> None:
    for missing in (1, 2):
        torn = tmp_path / str(missing)
        shutil.copytree(folder / "1-3-2", torn)
        next(torn.glob(f"shard-{missing:05d}-*")).unlink()
        with pytest.raises(StoreError, match=r"is of another model; these parameters differ: .*layers"):
            trainer_of(SCENARIOS["paper"], ALONE).load_checkpoint(torn)


def test_a_rank_that_cannot_be_watched_is_lost_and_rank_0_does_not_wait_for_it(tmp_path: Path) -> None:
    config = TrainerConfig(ranks=2)
    spec = TrainerSpec(
        model="",
        mailbox="",
        mailbox_folder="",
        trainer=config.model_dump_json(),
        algorithm="{}",
        sampling=SAMPLING,
        threads=1,
        log=str(tmp_path / "\0"),  # no process can have such a log
    )
    group = RankGroup(spec)
    group._ending = True  # else the watch ends this process
    asyncio.run(group._watch(0, lambda loss: None))
    lost = group.explain(RuntimeError("a collective failed"))
    assert isinstance(lost, RankLost)
    assert lost.how.startswith("lost rank 1, whose watch failed: ValueError")
