"""Promises of the conductor's benchmark: simulated machines on real sockets are machines to the run. What they are
given is trained once and on record, also when some of them vanish in mid-run."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.simulated_run import Setting, simulated_run
from stretto.core.tasks import run_beside
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run

MACHINES, STEPS, BATCH, GROUP = 16, 3, 16, 4


@pytest.mark.parametrize(("vanishing", "seconds"), [(0, 0.0), (4, 0.1)])
def test_sixteen_machines_lose_nothing(tmp_path: Path, vanishing: int, seconds: float) -> None:
    setting = Setting(MACHINES, STEPS, BATCH, GROUP, in_flight=2 * MACHINES, tokens=8, seconds=seconds, lease=2.0)
    vanished = []

    async def work() -> None:
        async with simulated_run(setting, tmp_path / "run") as run:
            await run_beside(run.roles.supervise(), run.all_up())
            assert len(run.cluster.gate.machines) == MACHINES
            loop = asyncio.get_running_loop()

            def vanish() -> None:
                vanished.append(loop.create_task(run.fleet.do(f"vanish {vanishing}")))

            def begun() -> None:
                if vanishing:
                    loop.call_later(0.05, vanish)

            await run.conduct(beside=begun)
            report = await run.fleet.do("report")
            balance = run.ledger.balance()
            assert balance.trained == STEPS * BATCH * GROUP
            assert balance.issued == balance.trained + balance.buffered + balance.in_flight
            assert report.completions >= balance.trained + balance.buffered
            assert len(run.pool.names) == MACHINES - vanishing

    asyncio.run(asyncio.wait_for(work(), 120))
    found = inspect_run(tmp_path / "run")
    assert len(vanished) == bool(vanishing)
    assert check_run(tmp_path / "run").kept
    assert found.trajectories.trained == STEPS * BATCH * GROUP
    assert len(found.engines) == MACHINES
    assert sum(engine.left_step is not None for engine in found.engines) == vanishing
