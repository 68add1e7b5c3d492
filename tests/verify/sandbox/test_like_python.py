"""The sandbox beside plain Python, over the ways in which programs read, write and end.

Promises: at levels A, C and D, where they can be stood on, a program writes the same and ends with the same status as a
script that the interpreter runs without a sandbox: all programs at the strongest level, and each at one of the others,
in turn, since what reads, writes and ends is the same guest at all of them.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, ladder
from tests.verify.tables import sections

GIVEN = b"3\n1 2 3\nlast line\n"
#: By name: how they read, then how they write, then how they end.
IDIOMS = sections("programs.txt")
CONFIG = SandboxConfig()
# Levels A and B differ by a control group, level E has no walls, and a cold guest is a warm one that has run nothing.
LADDER = [walls for walls in ladder(True) if walls.warm and walls.level not in (Level.B, Level.E)]


#: Forks a process for each program, which it runs and ends as the interpreter itself would: to start one for each takes
#: as long as all else here.
PLAIN = """
import json, os, sys
for source, name in json.loads(sys.argv[1]):
    if not os.fork():
        os.dup2(os.open("given", os.O_RDONLY), 0)
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, int]]:
    """What the interpreter makes of each, as a script in a file."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "given").write_bytes(GIVEN)
    told = json.dumps([(source, str(place)) for place, source in enumerate(IDIOMS.values())])
    python = [str(Path(getattr(sys, "_base_executable", sys.executable))), "-I", "-B", "-c", PLAIN, told]
    ended = subprocess.run(python, stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd=folder, check=False)
    statuses = map(int, ended.stdout.split())
    wrote = ((folder / str(place)).read_bytes() for place in range(len(IDIOMS)))
    return dict(zip(IDIOMS, zip(wrote, statuses, strict=True), strict=True))


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[list[Sandbox]]:
    """Those that can be stood on here, the strongest first."""
    standing = list[Sandbox]()
    with ExitStack() as stack:
        for walls in LADDER:
            sandbox = stack.enter_context(Sandbox(walls, CONFIG))
            with suppress(SandboxFailed):  # this level is not offered here
                sandbox.run({"source": ""}, b"", 5.0)
                standing.append(sandbox)
        assert standing, "the lowest level asks for nothing"
        yield standing


@pytest.mark.parametrize("name", IDIOMS)
def test_a_program_writes_and_ends_as_a_script_does(
    sandboxes: list[Sandbox], plain: dict[str, tuple[bytes, int]], name: str
) -> None:
    strongest, *weaker = sandboxes
    other = weaker[[*IDIOMS].index(name) % len(weaker)] if weaker else strongest
    for sandbox in (strongest, other):
        ended = sandbox.run({"source": IDIOMS[name]}, GIVEN, 10.0)
        assert (ended.output, ended.status) == plain[name], ended
