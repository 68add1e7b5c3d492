"""Promise of a rendezvous: a network interface that is not there is named, with those that are."""

import pytest
from torch import distributed

from stretto.core.errors import RecipeError
from stretto_cluster.ranks.collectives import _no_way, join, open_store

NCCL = "NCCL error in: ProcessGroupNCCL.cpp: internal error. Last error: Bootstrap : no socket interface found"


def test_a_rank_that_finds_no_interface_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    try:
        with pytest.raises(RecipeError, match=r"GLOO_SOCKET_IFNAME: 'nosuch0' of rank 0 on .* one of .*lo"):
            join(open_store(1), 0, 1, "cpu")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_words_of_nccl_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    found = _no_way(NCCL, 3)
    assert found is not None
    assert str(found).startswith("NCCL_SOCKET_IFNAME: '=eth7' of rank 3 on ")
    assert _no_way("NCCL error: unhandled cuda error", 3) is None
