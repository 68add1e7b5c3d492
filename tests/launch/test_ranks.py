"""A trainer of several processes in a real run.

- Two ranks train, publish, save and are resumed by one, and the run folder shows no difference.
- Three ranks are resumed by two. With adapters the engines sample by the policy that they come to,
  however many ranks publish them, and that is what is saved, beside the adapters.
- A rank that dies, hangs or runs out of memory ends the trainer with its name; the conductor replaces the whole set.
  Where memory is short again, the run ends with what needs less.
- More ranks than there is work for, or GPUs, is refused before anything starts.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from stretto.model.hf.folder import load_policy
from stretto.store.series.metrics import read_metrics
from tests.launch.running import TINY, Command, Laboratory, assert_the_law, said, wait_until
from tests.tolerances import EXACT, assert_close

OUT_OF_MEMORY = """
import time
from pathlib import Path
import torch
from stretto.trainer.objective.surrogates import cispo
from stretto.trainer.trainer import Trainer

train = Trainer.train

def short(self, batch):
    if self._ranks.rank == 1 and batch.step in (2, 3):
        Path(f"HERE/step {batch.step}").touch()
        while not Path(f"HERE/go on with {batch.step}").exists():
            time.sleep(0.01)
    if self._ranks.rank == 1 and (batch.step == 3 or batch.step == 2 and not Path("HERE/once").exists()):
        Path("HERE/once").touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of 80 GiB.")
    return train(self, batch)

Trainer.train = short

def loss(policy, tokens):
    return cispo(policy, tokens)
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        # `tests/trainer/test_rank_group.py` has it with real ranks, and no run.
        pytest.param(signal.SIGSTOP, "sent no heartbeat", marks=pytest.mark.long),
    ],
)
def test_two_ranks_train_are_replaced_as_a_whole_whatever_one_of_them_lacks_and_one_goes_on(
    laboratory: Laboratory, tmp_path: Path, number: signal.Signals, how: str
) -> None:
    """Memory is short once in step 2, which then goes well, and again and again in step 3."""
    (tmp_path / "short.py").write_text(OUT_OF_MEMORY.replace("HERE", str(tmp_path)))
    run_dir, kept = tmp_path / "run", "trainer.keep_versions=1"
    parts = (f"path={tmp_path}", "algorithm.loss=short:loss", "trainer.steps=4")
    with laboratory.train(run_dir, *parts, kept, "trainer.ranks=2", "deadlines.hung=2") as command:
        wait_until((tmp_path / "step 2").exists, "rank 1 in step 2", command)
        trainer, lost = command.role("trainer"), rank_of(command)
        os.kill(lost, number)
        (tmp_path / "go on with 2").touch()
        wait_until((tmp_path / "step 3").exists, "rank 1 in step 3", command)
        assert command.role("trainer") != trainer
        assert rank_of(command) != lost
        (tmp_path / "go on with 3").touch()
        ended = command.end()
        command.assert_nothing_is_left()
    again = "a new trainer fared no better: a smaller trainer.micro_batch_tokens"
    ended.failed(
        "rank 1 ran out of memory on its device in step 3: CUDA out of memory. Tried to allocate 2.00 GiB", again
    )
    told = said(run_dir)
    assert f"trainer lost rank 1, which {how}" in told
    for step in (2, 3):
        assert told.count(f"trainer stopped: rank 1 ran out of memory on its device in step {step}") == 1
    assert assert_the_law(run_dir).steps == 2
    laboratory.trained(run_dir, *parts, kept, "trainer.ranks=1", "deadlines.hung=2", "--resume")
    assert assert_the_law(run_dir).steps == 4
    assert (run_dir / "policy" / "v000004" / "model.safetensors").is_file()


@pytest.mark.long
def test_adapters_are_trained_published_and_saved_as_a_whole_policy(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lora = ("trainer.lora.rank=4", "trainer.learning_rate=1e-2", "trainer.keep_versions=1")
    laboratory.trained(run_dir, "trainer.steps=2", *lora, "trainer.ranks=3")
    laboratory.trained(run_dir, "trainer.steps=3", *lora, "trainer.ranks=2", "--resume")
    assert assert_the_law(run_dir).steps == 3
    trained = [line.trainer for line in read_metrics(run_dir / "metrics.jsonl")[0]]
    assert len(trained) == 3
    errors = [metrics.get("behavior_logprob_error") or 0.0 for metrics in trained]
    assert 0 < max(errors) < EXACT, "what engines sample by is the policy with its adapters"
    start, last = (run_dir / "policy" / name for name in ("v000000", "v000003"))
    plain, adapted = load_policy(start), load_policy(last)
    merged = PeftModel.from_pretrained(load_policy(start), last / "adapter").merge_and_unload()
    named = dict(merged.named_parameters())
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), adapted.parameters(), strict=True))
    for name, parameter in adapted.named_parameters():
        assert_close(named[name], parameter)


def rank_of(command: Command) -> int:
    (pid,) = command.processes("stretto_cluster.ranks.rank")
    return pid


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (("trainer.ranks=8",), ("trainer.ranks = 8", "trainer.minibatches = 2", "16 completions", "is 8")),
        (("trainer.ranks=0",), ("trainer.ranks", "greater than or equal to 1")),
        (("trainer.ranks=2", "trainer.remote_ranks=2"), ("remote_ranks = 2 of ranks = 2", "at most 1 can run")),
    ],
)
def test_more_ranks_than_there_is_work_for_is_refused(
    laboratory: Laboratory, tmp_path: Path, overrides: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    laboratory.run("train", TINY, *overrides, "--dry-run").refused(*texts)
