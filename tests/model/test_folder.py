"""Promises: a model folder is checked without loading it and every mistake is found, all at once; what loads is what
was saved; a folder appears whole or not at all; no saved file names our attention paths."""

import errno
import json
import multiprocessing
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.core.errors import ModelFolderError
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import (
    inspect_model_folder,
    load_policy,
    save_policy,
    saved_dtype,
    weights_dtype,
    whole_folder,
)
from stretto.model.hf.tokenizer import load_tokenizer

SMALL = BuildConfig(hidden_size=16, layers=2, heads=2, kv_heads=2, head_dim=8, intermediate_size=24, alphabet="01+=")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "policy"
    build_policy(SMALL, path, seed=1)
    return path


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "policy"))


def edit(file: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes the key."""
    tree = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def no_end(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)


def without_ends(folder: Path) -> None:
    no_end(folder)
    edit(folder / "generation_config.json", eos_token_id=[])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def long_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[1]!")


def texts_for_numbers(folder: Path) -> None:
    header = json.dumps({"embed_tokens.weight": {"dtype": "F32", "shape": ["6"], "data_offsets": ["0", "4"]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def shards(folder: Path) -> None:
    weights = dict.fromkeys(load_file(folder / "model.safetensors"), "model-1.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    listed = weights | {"model.ghost.weight": "model-1.safetensors", "model.far.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def round_about(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def folder_for_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


def index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def one_tensor(folder: Path, name: str = "", shape: Sequence[int] = ()) -> None:
    """Weights of one tensor without a byte; of none without a name."""
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}} if name else {}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def ends_with(folder: Path, token: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=token)


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").rename(folder / "adapter_config.json")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json: holds no JSON object"),
    (lambda folder: edit(folder / "config.json", vocab_size="six"), "config.json: vocab_size: 'six'"),
    (lambda folder: edit(folder / "config.json", vocab_size=5), "has 6 rows, config.json says vocab_size 5"),
    (lambda folder: edit(folder / "config.json", architectures=[], model_type=None), "names no architecture"),
    (lambda folder: (folder / "model.safetensors").unlink(), "it holds no weights"),
    (pickled, "loading a pickle runs its code"),
    (cut, "its header says"),
    (long_header, "announces a header of 1,099,511,627,776 bytes"),
    (no_header, "has a header that cannot be read"),
    (texts_for_numbers, "has a header that cannot be read (ValidationError: Expected `int`, got `str`"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "is 3 bytes, too short"),
    (shards, "model-2.safetensors: no such file"),
    (shards, "lists model.ghost.weight"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
    (no_end, "no end-of-sequence token"),
    (lambda folder: edit(folder / "generation_config.json", eos_token_id=[1, 6]), "eos_token_id: 6; allowed: 0 to 5"),
    (lambda folder: edit(folder / "generation_config.json", eos_token_id=-1), "eos_token_id: -1; allowed: 0 to 5"),
    (lambda folder: edit(folder / "generation_config.json", eos_token_id="end"), "eos_token_id: 'end'; allowed"),
    (lambda folder: edit(folder / "generation_config.json", eos_token_id=True), "eos_token_id: True; allowed"),
    (without_ends, "no end-of-sequence"),
    (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json: cannot be read"),
    (lambda folder: (folder / "config.json").write_text(""), "config.json: cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_bytes("{}".encode("utf-16")), "config.json: cannot be read"),
    (lambda folder: edit(folder / "config.json", num_attention_heads=0), "num_attention_heads: 0; a positive"),
    (
        lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2", "n_head": 2, "vocab_size": 9}'),
        "config.json: 'gpt2' has no max_position_embeddings, num_hidden_layers, hidden_size; only models of Llama's or "
        "GPT-2's form, which have them, are supported",
    ),
    (lambda folder: edit(folder / "config.json", hidden_size=16.5), "hidden_size: 16.5; a positive whole number"),
    (lambda folder: edit(folder / "config.json", num_hidden_layers=True), "num_hidden_layers: True; a positive"),
    (lambda folder: edit(folder / "config.json", head_dim="eight"), "head_dim: 'eight'; a positive"),
    (lambda folder: edit(folder / "config.json", head_dim=-8), "head_dim: -8; a positive"),
    (lambda folder: edit(folder / "config.json", max_position_embeddings=None), "max_position_embeddings: None"),
    (lambda folder: edit(folder / "config.json", text_config=3), "text_config: 3; an object is needed"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is 0 bytes, too short"),
    (lambda folder: round_about(folder / "model.safetensors"), "Too many levels of symbolic links"),
    (lambda folder: round_about(folder / "config.json"), "Too many levels of symbolic links"),
    (lambda folder: folder_for_file(folder / "model.safetensors"), "Is a directory"),
    (lambda folder: folder_for_file(folder / "config.json"), "Is a directory"),
    (lambda folder: index(folder, []), "model.safetensors.index.json: holds no JSON object"),
    (lambda folder: index(folder, {"weight_map": ["model.safetensors"]}), "weight_map: is no table"),
    (lambda folder: index(folder, {"weight_map": {"a": 3}}), "weight_map: is no table"),
    (lambda folder: index(folder, {"weight_map": {"a": "../model.safetensors"}}), "lists '../model.safetensors'"),
    (lambda folder: index(folder, {"weight_map": {"a": "a\0b"}}), r"lists 'a\x00b'"),
    (lambda folder: index(folder, {"weight_map": {"a": "\ud800"}}), r"lists '\ud800'"),
    (lambda folder: index(folder, {"weight_map": {"a": "a" * 256}}), "lists 'aaaaaaaa"),
    (lambda folder: one_tensor(folder, "model.embed_tokens.weight", []), "has 0 rows, config.json says vocab_size 6"),
    (lambda folder: one_tensor(folder, "a", [-1]), "has a header that cannot be read"),
    (lambda folder: one_tensor(folder), "it holds no weights"),
    (lambda folder: edit(folder / "config.json", num_attention_heads=99, head_dim=None), "num_attention_heads: 99"),
    (lambda folder: ends_with(folder, ["<eos>"]), "no end-of-sequence token"),
    (lambda folder: ends_with(folder, {"content": ["<eos>"]}), "no end-of-sequence token"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json: cannot be read as JSON"),
    (adapter, "config.json: no such file"),
    (adapter, "it holds no weights of its own: an adapter needs the model it was made for"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_a_broken_folder_is_named_with_its_place(folder: Path, breaks: Callable[[Path], object], message: str) -> None:
    breaks(folder)
    with pytest.raises(ModelFolderError) as error:
        inspect_model_folder(folder)
    assert message in str(error.value)


def test_all_mistakes_are_found_at_once(folder: Path) -> None:
    cut(folder)
    no_end(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError) as error:
        inspect_model_folder(folder)
    assert len(error.value.problems) == 3


def test_a_tokenizer_that_knows_more_than_the_embedding_is_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelFolderError, match="knows token 6, the embedding has 6 rows"):
        inspect_model_folder(folder)


def test_the_same_weights_in_other_formats_are_neither_counted_nor_saved_again(folder: Path, tmp_path: Path) -> None:
    """As some folders of the hub have them; in a saved policy they would be those of before the training."""
    facts = inspect_model_folder(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(16, 16)}, folder / "consolidated.safetensors")
    for name in ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "consolidated.00.pth", "model.gguf"):
        (folder / name).write_bytes(b"another format")
    assert inspect_model_folder(folder) == facts
    policy, out = load_policy(folder), tmp_path / "out"
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").touch()
    save_policy(policy, folder, out)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in out.iterdir()} == names


def test_ids_that_are_no_numbers_are_left_to_who_loads_the_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["odd"] = "six"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert inspect_model_folder(folder).vocab_size == 6
    with pytest.raises(ModelFolderError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_no_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="file: is a file"):
        inspect_model_folder(tmp_path / "file")
    with pytest.raises(ModelFolderError, match=r"nothing: no such folder.* is needed$"):
        inspect_model_folder(tmp_path / "nothing")
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "config.json").touch()
    with pytest.raises(ModelFolderError, match=r"somethin: no such folder.*; did you mean 'something'"):
        inspect_model_folder(tmp_path / "somethin")


def test_the_end_token_comes_from_the_tokenizer_when_no_config_names_it(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    assert inspect_model_folder(folder).eos_token_ids == (1,)


def test_the_end_token_of_the_tokenizer_ends_a_completion_too(folder: Path) -> None:
    """Some fine-tunes name the end of a turn there alone; vLLM stops at it."""
    edit(folder / "generation_config.json", eos_token_id=[0])
    assert inspect_model_folder(folder).eos_token_ids == load_tokenizer(folder).eos_token_ids == (0, 1)
    edit(folder / "tokenizer_config.json", eos_token="<new>")  # which the model cannot sample
    assert inspect_model_folder(folder).eos_token_ids == load_tokenizer(folder).eos_token_ids == (0,)


def test_a_large_tokenizer_is_parsed_once_for_the_facts_of_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, texts = Path.read_text, list[str]()

    def noted(file: Path, encoding: str | None = None) -> str:
        texts.append(file.name)
        return read(file, encoding)

    monkeypatch.setattr(Path, "read_text", noted)
    inspect_model_folder(folder)
    load_tokenizer(folder)  # by the package of tokenizers
    assert texts.count("tokenizer.json") == 1


def test_a_list_of_end_tokens_is_kept_whole(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 0])
    assert inspect_model_folder(folder).eos_token_ids == (1, 0)


def test_a_saved_policy_is_loaded_by_transformers_with_equal_weights(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder, attention=CACHED_ATTENTION)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    save_policy(policy, folder, tmp_path / "out" / "v000001")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "v000001")
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), saved.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "v000001")("1+0")["input_ids"] == [3, 4, 2]
    assert not any(CACHED_ATTENTION in file.read_text() for file in (tmp_path / "out" / "v000001").glob("*.json"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v000001"]


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"top_p": 0.9, "top_k": 20}, {"pad_token_id": -1}])
def test_generation_settings_are_saved_as_they_are_also_those_that_transformers_would_not_write(
    folder: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 0], **settings)
    policy = load_policy(folder)
    for parameters in (None, policy.named_parameters()):
        save_policy(policy, folder, tmp_path / "out", parameters)
        names = (tmp_path / "out" / "generation_config.json", folder / "generation_config.json")
        assert names[0].read_bytes() == names[1].read_bytes()
    save_policy(load_policy(tmp_path / "out"), tmp_path / "out", tmp_path / "out")
    assert inspect_model_folder(tmp_path / "out").eos_token_ids == (1, 0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "num_beams": 2}])
def test_without_generation_settings_of_its_own_a_saved_policy_has_those_of_the_config_of_its_start(
    folder: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=[1, 0], **settings)
    save_policy(load_policy(folder), folder, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").exists() == bool(settings)
    assert inspect_model_folder(tmp_path / "out").eos_token_ids == (1, 0)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.to_dict()
    assert found.items() >= {**settings, "eos_token_id": [1, 0]}.items()


def test_a_policy_that_transformers_does_not_write_is_a_mistake_with_its_folder(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder)
    policy.config.temperature = 0.6
    with pytest.raises(ModelFolderError, match=r"out: the policy cannot be saved: ValueError: .*temperature"):
        save_policy(policy, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_saving_over_a_policy_replaces_it(folder: Path) -> None:
    save_policy(load_policy(folder, dtype="bfloat16"), folder, folder)
    assert inspect_model_folder(folder).dtype == "bfloat16"
    assert load_policy(folder, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_is_written_in_another_dtype_as_each_weight_rounded(tmp_path: Path, dtype: str, tied: bool) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    build_policy(SMALL.model_copy(update={"tie_embeddings": tied}), start, seed=1)
    policy = load_policy(start)
    save_policy(policy, start, out, dtype=dtype)
    assert (inspect_model_folder(out).dtype, weights_dtype(out)) == (dtype, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert policy.dtype == torch.float32
    saved = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    rounded = {name: weight.to(getattr(torch, dtype)) for name, weight in policy.named_parameters()}
    assert saved.dtype == getattr(torch, dtype)
    assert all(torch.equal(weight, rounded[name]) for name, weight in saved.named_parameters())
    assert {weight.dtype for weight in load_file(out / "model.safetensors").values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("own", "wanted", "written"),
    [
        ("float32", "model", None),
        ("float64", "model", None),
        ("bfloat16", "model", "bfloat16"),
        ("float16", "model", "float16"),
        ("bfloat16", "float32", None),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_a_trained_policy_has_the_dtype_of_its_start_unless_the_recipe_says_another(
    folder: Path, own: str, wanted: str, written: str | None
) -> None:
    save_policy(load_policy(folder, dtype=own), folder, folder)
    assert saved_dtype(wanted, folder) == written


def test_a_folder_that_was_not_finished_never_appears(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_folder(tmp_path / "policy") as partial:
            (partial / "config.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_folder_wait_for_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = iter(4 * [threading.Barrier(4).wait])  # then the folder around it
    with whole_folder(tmp_path / "policy") as partial:
        for name in "abc":
            (partial / name).touch()
        monkeypatch.setattr(os, "fsync", lambda descriptor: next(together, int)(10))


def test_a_saved_policy_is_on_disk_before_it_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a folder that is there is whole: nothing is saved a second time to where a policy is."""
    synced, fsync = dict[int, bool](), os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = saved.exists()

    saved = tmp_path / "new" / "too" / "saved"
    monkeypatch.setattr(os, "fsync", note)
    save_policy(load_policy(folder), folder, saved)
    written = {path.stat().st_ino: False for path in (saved, *saved.iterdir())}
    assert synced == {**written, **{parent.stat().st_ino: True for parent in saved.parents[:3]}}


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one_there(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("old")
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "policy") as partial:
        partial.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (tmp_path / "policy" / "config.json").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two names in one step")
def test_a_folder_that_is_replaced_is_there_at_every_moment(tmp_path: Path) -> None:
    """So a kill finds it there too."""

    def replace_often() -> None:
        for _ in range(300):
            with whole_folder(tmp_path / "policy"):
                pass

    (tmp_path / "policy").mkdir()
    child = multiprocessing.get_context("fork").Process(target=replace_often)
    child.start()
    missing = 0
    while child.is_alive():
        missing += sum(not os.path.exists(tmp_path / "policy") for _ in range(1_000))
    assert (child.exitcode, missing) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_link_to_a_folder_is_replaced_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "policy").symlink_to(tmp_path / "run")
    for _ in range(2):
        with whole_folder(tmp_path / "policy"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "run"]


def test_two_policies_keep_their_own_attention(folder: Path) -> None:
    cached, plain = load_policy(folder, attention=CACHED_ATTENTION), load_policy(folder, attention="eager")
    assert (cached.config._attn_implementation, plain.config._attn_implementation) == (CACHED_ATTENTION, "eager")
    assert not cached.training


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"lacks the weight model\.norm\.weight"):
        load_policy(folder)


def test_a_folder_that_transformers_cannot_load_is_a_named_error(folder: Path) -> None:
    edit(folder / "config.json", model_type="nonesuch")
    with pytest.raises(ModelFolderError, match="cannot be loaded"):
        load_policy(folder)
    with pytest.raises(ModelFolderError, match="no such folder"):
        load_policy(folder / "nowhere")


def test_an_error_of_the_system_that_names_no_file_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, whole_folder(tmp_path / "policy"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "policy")
