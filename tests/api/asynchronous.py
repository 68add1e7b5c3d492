"""examples/grpo_async.py as a module, for a process that is forked (`tests.launch.warm`)."""

from __future__ import annotations

import runpy

from tests.launch.running import ROOT


def main() -> None:
    runpy.run_path(str(ROOT / "examples" / "grpo_async.py"), run_name="__main__")
