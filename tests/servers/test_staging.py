"""Promises: a server finds a folder that looks like the model's with the newest verified weights; a damaged publication
is never staged; what is staged stays whole however many versions are published meanwhile."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.core.errors import TornPublication, WireError
from stretto.weights.folder import remove
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_servers.staging import StagedWeights


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("model.embed_tokens.weight", torch.full((4, 2), float(version)))]


def staging(tmp_path: Path) -> tuple[SharedMemoryPublisher, StagedWeights]:
    model = tmp_path / "model"
    model.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch.bin",
    ):
        (model / name).write_text(name)
    (model / "model.safetensors.index.json").write_text("{}")
    subscriber = SharedMemorySubscriber("run", tmp_path / "mailbox")
    return SharedMemoryPublisher("run", tmp_path / "mailbox"), StagedWeights(subscriber, model, tmp_path / "engine-0")


def test_the_folder_has_config_tokenizer_and_the_weights_of_the_version(tmp_path: Path) -> None:
    publisher, staged = staging(tmp_path)
    for version in (0, 1):
        publisher.publish(version, weights(version))
        folder = staged.folder_of(version)
        assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
        assert (folder / "config.json").read_text() == "config.json"
        found = load_file(folder / "model.safetensors")
        assert torch.equal(found["model.embed_tokens.weight"], torch.full((4, 2), float(version)))


def test_what_is_staged_stays_while_newer_versions_are_published(tmp_path: Path) -> None:
    publisher, staged = staging(tmp_path)
    publisher.publish(0, weights(0))
    folder = staged.folder_of(0)
    for version in range(1, 6):
        publisher.publish(version, weights(version))
    assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"][0, 0] == 0
    with pytest.raises(WireError, match="version 2 is not published; the newest there is 5"):
        staged.folder_of(2)
    staged.folder_of(5)
    held = list((tmp_path / "mailbox").glob("*.held"))
    assert [path.name for path in held] == ["stretto-run-vengine-0-000005.held"]  # one for each engine
    remove("run", tmp_path / "mailbox")
    assert list((tmp_path / "mailbox").iterdir()) == []


def test_a_damaged_publication_is_never_staged(tmp_path: Path) -> None:
    publisher, staged = staging(tmp_path)
    publisher.publish(0, weights(0))
    folder = staged.folder_of(0)
    publisher.publish(1, weights(1))
    file = tmp_path / "mailbox" / "stretto-run-v000001.weights"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(TornPublication, match="version 1"):
        staged.folder_of(1)
    assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"][0, 0] == 0
