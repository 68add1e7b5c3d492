"""Models of other families than Llama's, without HTTP: a whole mixture of experts comes back from its files bit for
bit, and a sequence may fill the context of learned positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.core.errors import RefusedRequest, StoreError
from stretto_tinker.compute.files import POLICY, Shape
from stretto_tinker.compute.learner import Learner
from stretto_tinker.wire.bodies import Adam, Lora
from stretto_tinker.wire.datums import Datum
from tests.tinker.speaking import backend_of
from tests.tiny_policy import EXPERTS, LEARNED, SHORT, build_of_family
from tests.verbs.plain import plain_model

_DATA = [Datum(np.arange(2, 9), {"target_tokens": np.arange(3, 10)})]


def forward_backward(learner: Learner, data: list[Datum]) -> Any:
    pieces = learner.forward_backward(data, "cross_entropy", {}, backward=True)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def step(learner: Learner) -> str:
    """The checksum of the weights after one."""
    forward_backward(learner, _DATA)
    learner.optim_step(Adam(learning_rate=1e-2))
    return learner.digest()


@pytest.mark.parametrize(("family", "special"), [("qwen3_moe", EXPERTS), ("opt", LEARNED)])
def test_a_whole_model_goes_on_from_its_files_exactly(family: str, special: Mapping[str, Any], tmp_path: Path) -> None:
    backend = backend_of(build_of_family(tmp_path / "base", family, special))
    first, second = (backend.create(Shape(None)) for _ in range(2))
    begun, trained = first.digest(), step(first)
    (folder := tmp_path / "saved").mkdir()
    first.save(folder)
    second.load(folder, optimizer=True)
    assert begun != trained == second.digest()
    assert step(first) == step(second)


def test_files_of_a_mixture_with_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    backend = backend_of(build_of_family(tmp_path / "base", "qwen3_moe", EXPERTS))
    fewer = backend_of(build_of_family(tmp_path / "fewer", "qwen3_moe", {**EXPERTS, "num_experts": 3}))
    (folder := tmp_path / "saved").mkdir()
    fewer.create(Shape(None)).save(folder)
    with pytest.raises(StoreError, match="is of a model of another shape"):
        backend.create(Shape(None)).load(folder, optimizer=False)
    next((folder / POLICY).glob("*.safetensors")).write_bytes(b"not tensors")
    with pytest.raises(StoreError, match="is not whole"):
        backend.create(Shape(None)).load(folder, optimizer=False)


def test_that_no_adapter_trains_a_mixtures_experts_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(build_of_family(tmp_path / "base", "qwen3_moe", EXPERTS))
    assert "no adapter trains the MLP of base, which has no linear layers" in caplog.text
    backend.check(Shape(Lora(4)))
    with pytest.raises(RefusedRequest, match="nothing is trained; one of train_attn, train_unembed"):
        backend.check(Shape(Lora(4, train_attn=False, train_unembed=False)))


@pytest.mark.parametrize("shape", [Shape(None), Shape(Lora(4))], ids=["whole", "adapters"])
def test_a_sequence_may_fill_the_context_of_learned_positions(shape: Shape, tmp_path: Path) -> None:
    folder = build_of_family(tmp_path / "base", "opt", LEARNED, SHORT)
    ids = [np.arange(2, 2 + length) for length in (16, 15)]
    found = forward_backward(backend_of(folder).create(shape), [Datum(one, {"target_tokens": one + 1}) for one in ids])
    model = plain_model(folder)
    for one, ours in zip(ids, found.logprobs, strict=True):
        rows = model(torch.from_numpy(one[None])).logits[0].log_softmax(-1)
        assert ours.tolist() == pytest.approx(rows[torch.arange(len(one)), one + 1].tolist(), abs=1e-5)
