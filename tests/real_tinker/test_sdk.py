"""Tinker's SDK as published, and its command line, before a server of ours."""

import json
import re
from pathlib import Path

import httpx
import pytest

from stretto.core.errors import RefusedRequest
from stretto_tinker.compute.losses import LOSSES, loss_of
from tests.real_tinker.conftest import NAME, PROGRAMS, SECONDS, Bench

_VERSION = "0.38.0"
pytestmark = pytest.mark.timeout(2 * SECONDS)


def test_the_whole_surface_of_the_sdk(bench: Bench) -> None:
    said = bench.run(str(PROGRAMS / "surface.py"), NAME)
    assert said.splitlines()[-1] == "done", said


def test_the_version_that_was_tried_is_the_one_that_is_named(bench: Bench) -> None:
    assert bench.run("-c", "import tinker; print(tinker.__version__)").strip() == _VERSION
    told = (Path(__file__).parents[2] / "docs" / "how_to" / "tinker.md").read_text()
    assert f"`tinker` {_VERSION}" in told


def test_every_path_and_loss_of_the_sdk_is_known(bench: Bench) -> None:
    """Served, or refused with its name and the reason."""
    told = json.loads(bench.run(str(PROGRAMS / "names.py")))
    assert len(told["paths"]) > 30
    with httpx.Client(base_url=bench.address, headers={"x-api-key": "tml-names"}) as client:
        for path in told["paths"]:
            said = [client.request(method, path).text for method in ("GET", "POST", "PUT", "DELETE")]
            assert any("no such path is known here" not in one for one in said), path
    for name in told["losses"]:
        if name not in LOSSES:
            with pytest.raises(RefusedRequest, match=f"{name} is not served: "):
                loss_of(name)


def test_the_sdks_command_line_lists_downloads_and_deletes(bench: Bench) -> None:
    key = "tml-line"
    said = bench.run(str(PROGRAMS / "surface.py"), NAME, key=key)
    run, state = (re.search(rf"^{word} (\S+)$", said, re.MULTILINE)[1] for word in ("run", "state"))  # type: ignore[index]

    def tinker(*words: str) -> str:
        return bench.run("-m", "tinker.cli", *words, key=key)

    assert NAME in tinker("model", "list")
    assert run in tinker("-f", "json", "run", "list")
    assert state in json.dumps(json.loads(tinker("-f", "json", "checkpoint", "list", "--run-id", run)))
    assert NAME in tinker("run", "info", run)
    tinker("checkpoint", "info", state)
    tinker("checkpoint", "download", state, "--output", str(bench.folder / "downloaded"))
    [config] = (bench.folder / "downloaded").rglob("adapter_config.json")
    assert "peft " in bench.run(str(PROGRAMS / "surface.py"), NAME, str(config.parent), key="tml-peft")
    tinker("checkpoint", "delete", state, "-y")
    assert state not in tinker("-f", "json", "checkpoint", "list", "--run-id", run)
