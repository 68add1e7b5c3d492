"""Promises of several ranks, whose models begin without memory and are filled from their folder: 1, 2 and 3 of them
give the same losses, and the same weights, to rounding; so do two with a critic, a reference, adapters and the rest;
the gradients of one batch agree for some losses; each rank holds only its part; all of them measure and decide alike.

- A checkpoint is written while the training goes on, and any number of ranks goes on from it.
- Models hold what a loaded model holds, to the last bit, buffers and merged experts included; loading takes no more
  than a layer beyond the shards; a policy that ranks have written has the bytes of one that a single rank has written.
- In bfloat16 the stream between the layers is bfloat16, and one rank keeps its own float32 stream.
"""

import asyncio
import re
import resource
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.core.errors import ModelFolderError, StoreError
from stretto.model.hf import folder as writing
from stretto.model.hf.folder import load_policy, save_policy, write_weights
from stretto.model.hf.layers import saved_buffers
from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.store.series.tokens import TokenOutcome
from stretto.trainer import checkpoint
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import RankLost
from stretto.trainer.ranks import ALONE
from stretto_cluster.ranks.filling import fill
from stretto_cluster.ranks.rank_group import RankGroup
from tests.tolerances import after_adam, assert_close
from tests.trainer.conftest import FAMILIES
from tests.trainer.rank_runs import LOSSES, PLAYED, SAMPLING, SCENARIOS, trainer_of
from tests.trainer.tiny import BACKWARD, spec_of, tiny
from tests.trainer.unloaded import FIRST, held_by, save

RUNS = [(count, name) for count, names in PLAYED.items() for name in names]


def seen(folder: Path, count: int, scenario: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{count}-{scenario}-{rank}.pt", weights_only=True)
    return found


@pytest.mark.parametrize(("count", "scenario"), [run for run in RUNS if run[1] != "half"])
def test_several_ranks_train_what_one_does(rank_runs: Path, count: int, scenario: str) -> None:
    one, several = seen(rank_runs, 1, scenario), seen(rank_runs, count, scenario)
    steps = SCENARIOS[scenario].steps
    tolerance = after_adam(steps * SCENARIOS[scenario].trainer.get("minibatches", 2), BACKWARD)
    assert len(one["metrics"]) == steps
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == {name: pytest.approx(value, rel=tolerance, abs=tolerance) for name, value in theirs.items()}
    for name, parameter in one["weights"].items():
        torch.testing.assert_close(several["weights"][name], parameter, rtol=0, atol=tolerance, msg=name)
    assert several["skipped"] == one["skipped"]


@pytest.mark.parametrize(("count", "scenario"), RUNS)
def test_all_ranks_measure_and_decide_alike(rank_runs: Path, count: int, scenario: str) -> None:
    first, *others = (seen(rank_runs, count, scenario, rank) for rank in range(count))
    for other in others:
        assert (other["metrics"], other["skipped"]) == (first["metrics"], first["skipped"])
        assert all(torch.equal(other["weights"][name], p) for name, p in first["weights"].items())


@pytest.mark.parametrize(("count", "scenario"), [(3, "few"), (2, "small"), (2, "selection"), (2, "adapters")])
def test_every_rank_has_what_became_of_all_tokens(rank_runs: Path, count: int, scenario: str) -> None:
    one = seen(rank_runs, 1, scenario)["tokens"]
    every = [seen(rank_runs, count, scenario, rank) for rank in range(count)]
    tolerance = after_adam(SCENARIOS[scenario].steps * SCENARIOS[scenario].trainer.get("minibatches", 2), BACKWARD)
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
def test_the_gradients_of_one_batch_are_those_of_one_process(rank_runs: Path, loss: str) -> None:
    one, two = seen(rank_runs, 1, loss)["moments"], seen(rank_runs, 2, loss)["moments"]
    assert one.keys() == two.keys()
    assert_close([two[name] for name in one], list(one.values()), BACKWARD)
    assert max(float(moment.abs().max()) for moment in one.values()) > 1e-4  # there is something to compare


def test_a_step_that_is_not_finite_on_one_rank_is_taken_by_none(rank_runs: Path) -> None:
    for count in (1, 2):
        found = seen(rank_runs, count, "poisoned")
        assert [update["bad_steps"] for update in found["metrics"]] == [0, 1]
        assert [bool(names) for names in found["skipped"]] == [False, True]


def test_each_rank_holds_its_part_of_the_parameters(rank_runs: Path) -> None:
    for count, (scenario, *_) in PLAYED.items():
        whole = seen(rank_runs, 1, scenario)["own"]
        parts = [seen(rank_runs, count, scenario, rank)["own"] for rank in range(count)]
        assert sum(parts) == whole
        assert max(parts) < 1.4 * whole / count  # a row of a matrix is never divided, and 13 rows not evenly


@pytest.mark.parametrize("name", ["1-3-apart", "1-3-2", "1-3-2-1"])
def test_a_checkpoint_is_gone_on_from_by_another_number_of_ranks(rank_runs: Path, name: str) -> None:
    """Optimizer and critic included, whether or not all ranks see the folder: `1-1` is one rank that goes on from its
    own checkpoint."""
    steps = len(re.findall(r"\d", name))
    straight, other = (
        torch.load(rank_runs / f"{path}.pt", weights_only=True)["weights"] for path in ("-".join("1" * steps), name)
    )
    for parameter, value in straight.items():
        torch.testing.assert_close(other[parameter], value, rtol=0, atol=after_adam(steps * 2, BACKWARD), msg=parameter)


def test_a_checkpoint_that_is_read_by_other_ranks_gives_the_same_weights(rank_runs: Path) -> None:
    """To the last bit: what is saved is what was trained, however it was divided and sent."""
    for name in ("1", "1-3-apart", "1-3-2"):
        trainer = trainer_of(SCENARIOS["critic"], ALONE)
        trainer.load_checkpoint(rank_runs / name)
        trained = torch.load(rank_runs / f"{name}.pt", weights_only=True)["weights"]
        assert all(torch.equal(weight, trained[key]) for key, weight in trainer.full_parameters())


def test_moments_in_host_memory_give_the_same_weights(rank_runs: Path) -> None:
    """To the last bit, of two ranks that go on from one checkpoint: `1-3-2` has its moments there."""
    host, device = (
        torch.load(rank_runs / f"{name}.pt", weights_only=True)["weights"] for name in ("1-3-2", "1-3-2-device")
    )
    assert all(torch.equal(weight, device[key]) for key, weight in host.items())


def test_each_rank_writes_its_part_of_a_checkpoint(rank_runs: Path) -> None:
    for name, count in (("1", 1), ("1-3-2", 2)):
        assert len(list((rank_runs / name).glob("shard-*.safetensors"))) == count
        assert len(list((rank_runs / name / "critic").glob("shard-*.safetensors"))) == count


def test_rank_0_writes_all_where_the_others_do_not_see_the_folder(rank_runs: Path) -> None:
    for part in (rank_runs / "1-3-apart", rank_runs / "1-3-apart" / "critic"):
        files = sorted(path.name.partition("-model")[0] for path in part.iterdir() if path.is_file())
        assert files == ["shard-00001", "trainer.json"]
    assert not (rank_runs / "not-there").exists()


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


def test_a_checkpoint_without_one_ranks_part_is_refused(rank_runs: Path, tmp_path: Path) -> None:
    for missing in (1, 2):
        torn = tmp_path / str(missing)
        shutil.copytree(rank_runs / "1-3-2", torn)
        next(torn.glob(f"shard-{missing:05d}-*")).unlink()
        with pytest.raises(StoreError, match=r"is of another model; these parameters differ: .*layers"):
            trainer_of(SCENARIOS["paper"], ALONE).load_checkpoint(torn)


def test_a_rank_that_cannot_be_watched_is_lost_and_rank_0_does_not_wait_for_it(tmp_path: Path) -> None:
    log = str(tmp_path / "\0")  # no process can have such a log
    group = RankGroup(spec_of("", TrainerConfig(ranks=2), SAMPLING, log=log))
    group._ending = True  # else the watch ends this process
    asyncio.run(group._watch(0, lambda loss: None))
    lost = group.explain(RuntimeError("a collective failed"))
    assert isinstance(lost, RankLost)
    assert lost.how.startswith("lost rank 1, whose watch failed: ValueError")


def made(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"2-{rank}.pt")
    return found


def loaded(folder: Path) -> Any:
    return load_policy(folder, attention=PACKED_ATTENTION)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_fill_a_model_with_what_its_folder_holds(rank_runs: Path, family: str) -> None:
    whole, own = held_by(loaded(rank_runs / "models" / family), ALONE), made(rank_runs)["filled"][family]
    assert whole.keys() == own.keys()
    assert all(torch.equal(own[name], one) for name, one in whole.items())


def test_loading_takes_about_a_layer_beyond_the_shards(rank_runs: Path) -> None:
    """Of 48M parameters the shards of 2 ranks are 96 MB each, and a layer is 21 MB. Half a layer more is for freed
    pieces: how many of them malloc keeps depends on what the process did before (14 to 23 MB in all were seen)."""
    for rank in range(2):
        beyond, layer, shards = made(rank_runs, rank)["beyond"]
        assert shards > 4 * layer
        assert beyond < 1.5 * layer


def test_in_bfloat16_ranks_keep_the_stream_in_it_and_one_rank_in_float32(rank_runs: Path) -> None:
    """Compare losses up to the rounding of bfloat16, 2^-8; master weights stay in float32."""
    one, several = (torch.load(rank_runs / f"{count}-half-0.pt", weights_only=True) for count in (1, 2))
    assert (one["streams"], several["streams"]) == ([torch.float32], [torch.bfloat16])
    assert {weight.dtype for weight in several["weights"].values()} == {torch.float32}
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        for key in ("loss", "value_loss"):
            assert ours[key] == pytest.approx(theirs[key], abs=2**-5)


def test_a_policy_is_written_alike_by_ranks_and_by_one(rank_runs: Path, tmp_path: Path) -> None:
    """With adapters, in bfloat16."""
    save(rank_runs / "models" / FIRST, ALONE, tmp_path / "one")
    saved = tmp_path / "one"
    files = sorted(
        file.relative_to(saved) for file in saved.rglob("*") if file.name != "adapter_config.json" and file.is_file()
    )
    assert Path("model.safetensors") in files
    assert Path("adapter/adapter_model.safetensors") in files
    for file in files:
        assert (rank_runs / "2-saved" / file).read_bytes() == (saved / file).read_bytes(), file


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_written_layer_by_layer_are_those_that_transformers_writes(
    rank_runs: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = rank_runs / "models" / family
    model = load_policy(start)
    write_weights(model, chain(model.named_parameters(), saved_buffers(model)), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    monkeypatch.setattr(writing, "_FILE_BYTES", 20_000)
    save_policy(model, start, tmp_path / "parts", model.named_parameters())
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    again = load_policy(tmp_path / "parts")
    assert all(torch.equal(held_by(again, ALONE)[name], one) for name, one in held_by(model, ALONE).items())


def test_a_folder_that_lacks_weights_or_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    for name, value, told in (("spoilt", float("nan"), "holds numbers that are not finite"), ("torn", None, "lacks")):
        model = tiny()
        kept = dict(model.state_dict())
        gone = "model.layers.1.mlp.up_proj.weight"
        kept[gone] = torch.full_like(kept[gone], value) if value is not None else kept.pop(gone)[:0]
        model.save_pretrained(tmp_path / name, state_dict={key: one for key, one in kept.items() if one.numel()})
        bare = skeleton(tmp_path / name, PACKED_ATTENTION)
        with pytest.raises(ModelFolderError, match=f"{told}.*{gone}|{gone}.*{told}"):
            fill(bare, bare, "cpu")
