"""Promises: a family is accepted only if the packed and the cached path compute what it computes.

- Families that ignore what a path passes to them are refused by name, with the path that differs, before any weights
  are read; so are those with a mask of their own, several attention calls in a layer, or arguments that are not handed
  on.
- A config that passes is measured once for each version of transformers and stretto; measured families never are.
- A damaged note of earlier measurements lets no family pass; a cache that cannot be written ends no start.
- Every measured family is accepted, and computes alike on both paths (the long tests measure all).
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from stretto.core.errors import ModelFolderError
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model import families
from stretto.model.attention_support import check_attention
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.families import MEASURED, check_family, check_family_of, measured
from stretto_kernels.choices import read_choices

DAILY = ("qwen3", "opt", "gemma3_text", "olmoe")
EACH = [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.long]) for name in sorted(MEASURED)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / families.FILE


def config(family: str, **settings: Any) -> Any:
    return AutoConfig.for_model(family, **settings)


@pytest.mark.parametrize("family", EACH)
def test_both_paths_compute_what_a_measured_family_computes(family: str) -> None:
    made = families._tiny(config(family))
    assert made is not None
    made.set_attn_implementation(CACHED_ATTENTION)
    check_attention(made)  # else `measured` leaves it to the loader
    assert measured(config(family)) == ""


@pytest.mark.parametrize("family", ["bart", "pegasus"])
def test_a_family_that_ignores_positions_is_refused_with_the_path_that_differs(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=rf"config.json \({family}\): packed texts differ .* by [0-9.]+ nats"):
        check_family(config(family))
    config(family).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelFolderError, match="packed texts differ"):
        check_family_of(tmp_path / "model")
    with pytest.raises(ModelFolderError, match="packed texts differ"):
        NativeEngine.load(tmp_path / "model", EngineConfig())  # there are no weights to read


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("doge", "attention with a mask of its own"),
        ("diffllama", "several attention calls in a layer"),
        ("stablelm", "attention that does not hand its arguments on"),
    ],
)
def test_attention_that_shows_its_kind_when_it_is_recorded_is_refused(family: str, found: str) -> None:
    made = families._tiny(config(family))
    assert made is not None
    made.set_attn_implementation(CACHED_ATTENTION)
    with pytest.raises(ModelFolderError, match=found):
        check_attention(made)


def test_parameters_that_begin_at_zero_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "check_attention", lambda model: None)  # its mask alone gives doge away
    assert "packed texts differ" in (measured(config("doge")) or "")


def test_a_config_that_passes_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measuring(one: Any) -> str:
        asked.append(one.num_hidden_layers)
        return "" if one.num_hidden_layers == 5 else "it differs"

    monkeypatch.setattr(families, "measured", measuring)
    for _ in range(2):
        check_family(config("jais2", num_hidden_layers=5))
        with pytest.raises(ModelFolderError, match=r"\(jais2\): it differs"):
            check_family(config("jais2", num_hidden_layers=6))
    check_family(config("qwen3"))  # is measured by the tests
    assert asked == [5, 6, 6]
    monkeypatch.setattr(families, "__version__", "another")
    check_family(config("jais2", num_hidden_layers=5))
    assert asked == [5, 6, 6, 5]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 1}', b"\xff"])
def test_a_damaged_note_lets_no_family_pass(cache: Path, damage: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(damage)
    with pytest.raises(ModelFolderError, match="packed texts differ"):
        check_family(config("bart"))


def test_without_a_writable_cache_a_family_is_always_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file"))
    check_family(config("jais2"))
    with pytest.raises(ModelFolderError, match="packed texts differ"):
        check_family(config("bart"))


def test_a_family_of_which_no_tiny_model_can_be_made_passes_with_a_warning_each_time(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        check_family(config("gpt_bigcode"))
        assert "the paths of gpt_bigcode are not compared with its own forward" in caplog.text
    check_family(config("doge"))  # the loader refuses it
    assert not read_choices(cache, str)


def test_a_folder_without_a_config_is_left_to_the_loader(tmp_path: Path) -> None:
    check_family_of(tmp_path)
