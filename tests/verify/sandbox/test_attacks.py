"""The sandbox against programs that try to break out of it, as root and as an ordinary user.

Promises: on every level that can be stood on here, everything is stopped that the level promises, and an honest
program works; the ladder is descended rung by rung, level E is refused unless asked for, and never given to root.
Real namespaces, real control groups, real attacks: what a machine does not offer is skipped by name.
"""

import os
from dataclasses import replace

import pytest

from stretto_verify.sandbox.attacks import ATTACKS
from stretto_verify.sandbox.attacks_on_limits import Attack
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Baits, probe, try_attack, try_rung
from stretto_verify.sandbox.sandbox import Sandbox
from stretto_verify.sandbox.walls import Level, Walls, ladder
from stretto_verify.verdicts import SandboxRefused
from tests.verify.sandbox.other_users import ORDINARY, as_user, delegated_groups

ROOT = os.getuid() == 0
USERS = [pytest.param(None, id="root" if ROOT else "ordinary")]
if ROOT:
    USERS.append(pytest.param(ORDINARY, id="ordinary"))
#: Every level, cold guests, and root beside the ordinary user, each once; the first rung of who runs the tests is
#: attacked by `probe` below. Cold rungs cost a process for each attack.
DAILY = frozenset({"A-warm-ordinary", "B-cold-ordinary", "C-warm-ordinary", "D-warm-root"})
#: Warm rungs for both users, and cold ones for one of the two in turn.
RUNGS = [
    pytest.param(walls, *user.values, id=name, marks=[] if name in DAILY else [pytest.mark.long])
    for place, walls in enumerate(ladder(True))
    for user in (USERS if walls.warm else [USERS[place // 2 % len(USERS)]])
    for name in [f"{walls.level}-{'warm' if walls.warm else 'cold'}-{user.id}"]
    if walls.level is not Level.E and (place, user) != (0, USERS[0])
]


def all_stopped(walls: Walls) -> str:
    stopped = sum(walls.level <= attack.stopped_by for attack in ATTACKS)
    return f"level {walls.level} ({'warm' if walls.warm else 'cold'}): {stopped} attacks stopped"


@pytest.mark.parametrize(("walls", "uid"), RUNGS)
def test_nothing_gets_through_that_a_level_promises_to_stop(walls: Walls, uid: int | None) -> None:
    def attacked() -> str:
        rung = try_rung(walls, SandboxConfig())
        return f"offered no: {rung.problem}" if rung.problem else f"{rung.holds} {rung}"

    with delegated_groups(uid) as groups:
        words = as_user(uid, attacked, groups)
    if words.startswith("offered no"):
        pytest.skip(f"level {walls.level} is not offered here: {words}")
    assert words == f"True {all_stopped(walls)}"


#: Attacks that get through where there are no walls, and do no harm there.
GENTLE = """
loopback, abstract socket, read /etc/passwd, read a secret file, read the grader's memory, ptrace, kill others,
list folders of the host, write to the host's /tmp, memory without a file system, a daemon that outlives the run,
marks on files of its user, locks and watches on the host's files, outlive the guest
"""


def test_attacks_are_attacks_where_nothing_stops_them() -> None:
    """An attack that never could get through would prove nothing."""
    names = GENTLE.strip().replace(",\n", ", ").split(", ")
    gentle = [attack for attack in ATTACKS if attack.name in names]

    def attacked() -> str:
        with Baits() as baits, Sandbox(Walls(Level.E, seccomp=False), SandboxConfig()) as sandbox:
            return ",".join(attack.name for attack in gentle if not try_attack(sandbox, attack, baits).stopped)

    assert {*as_user(ORDINARY if ROOT else None, attacked).split(",")} == {*names}


def test_the_strongest_walls_that_hold_are_taken_and_the_way_is_told() -> None:
    walls, report = probe(SandboxConfig())
    assert report.level is walls.level
    assert report.rungs[-1].holds
    assert str(report.rungs[-1]) == all_stopped(walls)
    assert not any(rung.holds for rung in report.rungs[:-1])
    assert f"level {walls.level}" in str(report)


def test_an_attack_that_gets_through_costs_the_level() -> None:
    always = Attack("print", "print('THROUGH')", Level.B)
    walls, report = probe(SandboxConfig(), [always])
    assert walls.level > Level.B
    assert [rung.holds for rung in report.rungs] == [False] * (len(report.rungs) - 1) + [True]


def test_no_level_that_is_safe_enough_is_an_error_with_the_way_out() -> None:
    hopeless = [Attack("print", "print('THROUGH')", Level.D)]
    with pytest.raises(SandboxRefused, match=r"no safe sandbox.*print got through.*bubblewrap"):
        probe(SandboxConfig(), hopeless)
    with pytest.raises(SandboxRefused, match="set a lower lowest_level"):
        probe(SandboxConfig(lowest_level="A"), hopeless)


def test_level_e_is_given_when_it_is_asked_for_and_never_to_root() -> None:
    hopeless = [Attack("print", "print('THROUGH')", Level.D)]
    unsafe = SandboxConfig(unsafe=True)

    def level() -> str:
        return probe(unsafe, hopeless)[0].level

    if ROOT:
        with pytest.raises(SandboxRefused, match="not for root"):
            level()
    assert as_user(ORDINARY if ROOT else None, level) == "E"


def test_a_rung_that_cannot_be_stood_on_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_verify.sandbox.walls._BWRAP_PLACES", "/nowhere")
    rung = try_rung(next(iter(ladder(True))), SandboxConfig())
    assert not rung.holds
    assert "not" in rung.problem or "denied" in rung.problem  # bubblewrap, or before it the group of an ordinary user
    assert try_rung(replace(next(iter(ladder(True))), group=False), SandboxConfig()).problem == (
        "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
    )
