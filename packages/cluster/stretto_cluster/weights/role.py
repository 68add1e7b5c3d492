"""Process that serves a run's weights to other machines: ``python -m stretto_cluster.weights.role SPEC``."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from stretto.core.records import Record
from stretto.processes.heartbeat import begin_role
from stretto.processes.run_role import run_role
from stretto_cluster.weights.server import WeightsApp, serve


class WeightsServerSpec(Record, frozen=True):
    """Spec of a weights server.

    `model`: folder of version 0. `key_file`: file with the key, because all users of a machine can read a command line.
    `tls` is a folder with ``ca.pem``, ``cert.pem`` and ``key.pem``, or None.

    Example: ``WeightsServerSpec("a1b2", "/dev/shm", "runs/first/policy/v000000", "0.0.0.0:8400", "/tmp/s/key")``
    """

    run: str
    folder: str
    model: str
    address: str
    key_file: str
    tls: str | None = None
    reference: str | None = None  # folder of the reference policy, if it has one of its own


def main(arguments: list[str]) -> int:
    """Run the role until the conductor ends it; return the exit code. An error is the last line of the log."""
    spec = msgspec.json.decode(arguments[0], type=WeightsServerSpec)
    begin_role()
    return run_role(lambda: _serve(spec), lambda failed: print(f"weights: {failed.problem}", file=sys.stderr))


def _serve(spec: WeightsServerSpec) -> None:
    key = Path(spec.key_file).read_text().strip()
    reference = Path(spec.reference) if spec.reference is not None else None
    app = WeightsApp(spec.run, Path(spec.folder), Path(spec.model), key, reference)
    serve(app, spec.address, Path(spec.tls) if spec.tls is not None else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
