"""The script for Slurm, run with stand-ins for `srun`, `scontrol` and `stretto` that note how they were called.

- The first node trains, the others join it; the token is made once, is in the environment, and on no command line.
- A run that has begun is resumed; one that Slurm's signal has stopped is requeued.
- With JOIN the nodes join a run that goes on elsewhere.
"""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "slurm.sbatch"
PATIENCE = 20.0

PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
    "scontrol": 'case $1 in show) printf "node1\\nnode2\\nnode3\\n";; *) echo "scontrol $*" >> "$CALLS";; esac',
    "stretto": """
        echo "stretto $*" >> "$CALLS"; echo "$STRETTO_TOKEN" >> "$TOKENS"
        trap "exit 143" TERM
        if [[ "$1" == engine || -n "${LONG:-}" ]]; then while :; do sleep 0.05; done; fi
        exit "${CODE:-0}"
    """,
}


class Desk:
    """A home with an environment to activate, the programs, and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.run = folder, folder / "calls", folder / "runs" / "one"
        activate = folder / "stretto" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{activate.parent}:$PATH"\n')
        for name, text in PROGRAMS.items():
            program = activate.parent / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)

    def start(self, nodes: int = 3, **settings: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "HOME": str(self.folder), "CALLS": str(self.calls), "TOKENS": str(self.folder / "tokens"),
            "RUN_DIR": str(self.run), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_JOB_NUM_NODES": str(nodes),
        }  # fmt: skip
        return subprocess.Popen(["bash", SCRIPT], env=environment | settings, cwd=self.folder)

    def told(self) -> list[str]:
        return sorted(self.calls.read_text().splitlines()) if self.calls.exists() else []

    def tokens(self) -> set[str]:
        return set((self.folder / "tokens").read_text().splitlines())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


ENGINE = "stretto engine --join node1:7420 --count 8"
START = "stretto train recipes/ray_2x8.toml --run-dir {} trainer.ranks=8 cluster.placer=given"
START += " cluster.listen=0.0.0.0:7420 deadlines.stop=60"


def test_the_first_node_trains_and_the_others_join_it_with_one_token(desk: Desk) -> None:
    assert desk.start().wait(PATIENCE) == 0
    assert START.format(desk.run) in desk.told()
    (token,) = desk.tokens()
    assert len(bytes.fromhex(token)) == 32
    assert not [call for call in desk.told() if token in call]
    assert stat.S_IMODE(Path(f"{desk.run}.token").stat().st_mode) == 0o600
    desk.run.mkdir()
    (desk.run / "ledger.sqlite").touch()
    assert desk.start().wait(PATIENCE) == 0
    assert f"stretto train --resume {desk.run}" in desk.told()
    assert desk.tokens() == {token}


def test_one_node_trains_alone(desk: Desk) -> None:
    assert desk.start(nodes=1, CODE="1").wait(PATIENCE) == 1
    assert desk.told() == [START.format(desk.run)]


def test_a_run_that_slurm_stops_ends_well_and_is_requeued(desk: Desk) -> None:
    script, until = desk.start(LONG="yes"), time.monotonic() + PATIENCE
    while len(desk.told()) < 2:
        assert time.monotonic() < until, desk.told()
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(PATIENCE) == 143
    assert desk.told() == ["scontrol requeue 17", ENGINE, START.format(desk.run)]


def test_nodes_join_a_run_that_goes_on_elsewhere_with_its_token(desk: Desk) -> None:
    known = desk.folder / "theirs"
    known.write_text("ab" * 32)
    script, until = desk.start(JOIN="node17:7420", TOKEN_FILE=str(known)), time.monotonic() + PATIENCE
    while not desk.told():
        assert time.monotonic() < until
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    script.wait(PATIENCE)
    assert desk.told() == ["stretto engine --join node17:7420 --count 8"]
    assert desk.tokens() == {"ab" * 32}
