"""Real nodes of Ray on this machine, each a raylet with processes of its own: started, and killed as machines are."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stretto_report.reading.inspection import inspect_run
from tests.launch.running import ROOT, Command, wait_until

#: Else Ray keeps a token in the user's home for its first local cluster, and later heads ask all nodes for it.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}

#: A run that ends when it is stopped.
ENDLESS = ("trainer.steps=100000", "trainer.keep_versions=1", "trainer.checkpoint_every=20", "cluster.lease=5")


@dataclass
class Cluster:
    """Nodes by name; the first is the head."""

    folder: Path
    port: int
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, name: str, cpus: int) -> None:
        """A node; the head if it is the first."""
        where = ["--head", "--port", str(self.port), "--include-dashboard=false"]
        words = where if not self.nodes else ["--address", self.address]
        with (self.folder / f"{name}.txt").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [
                    Path(sys.executable).with_name("ray"),
                    "start",
                    *words,
                    *("--num-cpus", str(cpus), "--block", "--disable-usage-stats"),
                    f"--object-store-memory={100 << 20}",
                ],
                env=os.environ | NO_TOKEN | {"RAY_TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: "Ray runtime started" in (self.folder / f"{name}.txt").read_text(), f"node {name}")

    def kill(self, name: str) -> None:
        """The node and all its processes, as when a machine loses its power."""
        for pid in _session(self.nodes[name].pid):
            os.kill(pid, signal.SIGKILL)
        self.nodes[name].wait()

    def kill_all(self) -> None:
        """Those that are left."""
        for name, node in self.nodes.items():
            if node.poll() is None:
                self.kill(name)


def _session(leader: int) -> list[int]:
    """The processes of a node: those that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = [leader]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


@contextmanager
def cluster(**cpus: int) -> Iterator[Cluster]:
    """A cluster with nodes of these names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    started = Cluster(folder, port)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(started.kill_all)
        for name, count in cpus.items():
            started.start(name, count)
        yield started


def serving(run_dir: Path) -> set[str]:
    """The engines that serve now."""
    return {engine.name for engine in inspect_run(run_dir).engines if engine.left_step is None}


def engines_join(command: Command, run_dir: Path, count: int) -> None:
    """Wait until so many serve."""
    wait_until(lambda: len(serving(run_dir)) == count, f"{count} engines", command)
