"""Pictures of the pages of `stretto watch`, docs/images/watch_*.png, showing the committed run
`benchmarks/data/watch_run`.

    python -m benchmarks.screenshots              takes the pictures
    python -m benchmarks.screenshots --record     replaces the run by a new one first

The run is a small asynchronous run of recipes/arithmetic.toml, with an adaptive bound and many completions in flight,
so that there are stale, clipped and masked tokens. Only the files that pages show are kept, no weights and no
checkpoints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.runs import RECIPE
from benchmarks.watch import server

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
RUN = Path(__file__).resolve().parent / "data" / "watch_run"
KEPT: tuple[str, ...] = (
    "recipe.toml",
    "machine.json",
    "versions.json",
    "metrics.jsonl",
    "spans.jsonl",
    "ledger.sqlite",
)
KEPT += ("tokens/*", "policy/v000000/tokenizer*.json")
SETTINGS: tuple[str, ...] = (
    "trainer.steps=40",
    "evaluation.every=10",
    "rollout.batch_size=4",
    "rollout.group_size=4",
)
SETTINGS += ('rollout.max_staleness="auto"', "rollout.max_in_flight=16")
SETTINGS += ("trainer.minibatches=4", "trainer.warmup_steps=0", "trainer.learning_rate=3e-4")
SETTINGS += ("algorithm.correction.high=1.5",)
PAGES = {
    "curves": "curves",
    "timeline": "timeline",
    "trajectory": "trajectory/{trajectory}?colour=fate",
    "health": "health",
}
SETTLED_MILLISECONDS = 2500  # curves are drawn in the frames after their data
COLOURS = 96  # of a picture: the pages have few


def record() -> None:
    """Train a new run, and keep the files that pages show."""
    with tempfile.TemporaryDirectory(prefix="stretto-screenshots-") as scratch:
        folder = Path(scratch, "run")
        command = [
            sys.executable,
            "-m",
            "stretto_app.cli.main",
            "train",
            str(RECIPE),
            *SETTINGS,
            "--run-dir",
            str(folder),
        ]
        subprocess.run(command, check=True)
        shutil.rmtree(RUN, ignore_errors=True)
        for path in (path for pattern in KEPT for path in folder.glob(pattern)):
            place = RUN / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        log = (folder / "log.txt").read_text(encoding="utf-8").replace(str(Path.home()), "~")
        (RUN / "log.txt").write_text(log, encoding="utf-8")
        with closing(sqlite3.connect(RUN / "ledger.sqlite")) as ledger:
            asked = {id for (id,) in ledger.execute("SELECT prompt_id FROM groups")}
        lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        kept = "".join(line for line in lines if json.loads(line)["id"] in asked)
        (RUN / "questions.jsonl").write_text(kept, encoding="utf-8")


def richest(client: httpx.Client, run: str) -> tuple[str, int]:
    """The most varied trajectory: training used some of its tokens, clipped and masked others. Also the place of its
    first clipped token."""
    found = client.get(f"/api/runs/{run}/trajectories?where=state%3Dtrained&sort=-staleness&limit=100").json()
    ids = [str(row["id"]) for row in found["rows"]]

    details = [client.get(f"/api/runs/{run}/trajectories/{id}").json() for id in ids]

    def worth(detail: dict[str, Any]) -> tuple[int, int]:
        counts = detail["training"] or {}
        return sum(map(bool, counts.values())), sum(counts.values())

    best = max(details, key=worth)
    fates = best["segments"][0]["tokens"]["fate"]
    return str(best["id"]), next((at for at, fate in enumerate(fates) if fate.startswith("clipped")), 0)


def photograph(folder: Path) -> None:
    """Take a picture of each page of a run."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(folder, Path(scratch)) as (client, _),
        sync_playwright() as playwright,
    ):
        (run,) = [row["id"] for row in client.get("/api/runs").json()["runs"]]
        trajectory, token = richest(client, run)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page.goto(f"{client.base_url}?token=T")
        page.get_by_test_id("run-row").first.wait_for()
        for name, place in PAGES.items():
            page.goto(f"{client.base_url}#/runs/{run}/{place.format(trajectory=trajectory.replace('/', '%2F'))}")
            page.wait_for_timeout(SETTLED_MILLISECONDS)
            if name == "trajectory":
                page.get_by_test_id("token").nth(token).hover()
            _shot(page.screenshot(), IMAGES / f"watch_{name}.png")
        browser.close()


def _shot(picture: bytes, path: Path) -> None:
    path.write_bytes(picture)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="train another run, and keep it in place of the last")
    if parser.parse_args().record:
        record()
    photograph(RUN)


if __name__ == "__main__":
    main()
