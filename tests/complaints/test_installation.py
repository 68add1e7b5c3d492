"""What users suffered: an extra that the documentation names is none of the package, or one is needed that no page
names (unsloth#4, vime#20, ART#449).

Promise: the extras on the pages and in messages are those of the package's metadata, and each for users is on a page.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"stretto\[([a-z,_-]+)\]")
_OF_DEVELOPERS = {"dev", "docs", "browser"}  # what the Makefile installs
_BESIDE_TORCH = {"gpu"}  # comes with torch's build for GPUs


def test_extras_on_the_pages_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    on_pages = {name for page in pages for one in _NAMED.findall(page.read_text("utf-8")) for name in one.split(",")}
    sources = [file.read_text("utf-8") for room in ("application", "packages") for file in (ROOT / room).rglob("*.py")]
    in_messages = {name for text in sources for found in _NAMED.findall(text) for name in found.split(",")} - {"extra"}
    assert on_pages | in_messages <= extras
    assert extras - on_pages <= _OF_DEVELOPERS | _BESIDE_TORCH
