"""Killable process that judges mathematics: ``python -m stretto_verify.worker``.

It reads one request per line from standard input, and writes one verdict per line to standard output.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import weakref

import msgspec

from stretto_verify.clock import clock_limit
from stretto_verify.verdicts import Judged, Record

_START_SECONDS = 60.0  # for its imports, on a busy machine
_END_SECONDS = 5.0
_READ = 1 << 16


class _MathRequest(Record, frozen=True):
    """One completion to be judged, with its gold answer and prompt."""

    completion: str
    gold: str
    prompt: str


class Worker:
    """Process that judges mathematics. It is started on first use, and killed and restarted when a verdict takes too
    long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[..., Worker] | None = None

    def judge(self, completion: str, gold: str, prompt: str, seconds: float) -> Judged:
        """Judge a completion. Undecided if that takes more than `clock_limit(seconds)` of wall-clock time (60 s more in
        a call that starts the process), the process ends, or the text has a lone surrogate. A late process is killed;
        the next call starts another."""
        try:
            request = msgspec.json.encode(_MathRequest(completion, gold, prompt)) + b"\n"
        except UnicodeEncodeError:
            return Judged("undecided", "the text is not valid Unicode (a lone surrogate)")
        first = self._process is None
        limit = clock_limit(seconds)
        try:
            line = self._ask(request, limit + (_START_SECONDS if first else 0.0))
        except BaseException:  # such as KeyboardInterrupt: its verdict would be taken for that on the next completion
            self.close()
            raise
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Judged)
        self.close()
        return Judged("undecided", f"no verdict within {limit:g} s" if line == b"" else "its process ended")

    def _ask(self, request: bytes, seconds: float) -> bytes:
        """Send a request, to a new process if there is none, and return the reply line. b"" if it does not come within
        `seconds`, b"?" if the process has ended; it is killed in neither case."""
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        until, unsent, reply = time.monotonic() + seconds, memoryview(request), b""
        try:
            while unsent:  # a pipe takes 64 KiB at once; a stopped process reads none of it
                if not select.select([], [process.stdin], [], max(0.0, until - time.monotonic()))[1]:
                    return b""
                unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
        except OSError:
            return b"?"
        while not reply.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                return b""
            if not (piece := os.read(process.stdout.fileno(), _READ)):
                return b"?"
            reply += piece
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "stretto_verify.worker"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._ended = weakref.finalize(self, _end, self._process)
        return self._process

    def close(self) -> None:
        """Kill the process, if there is one. A later `judge` starts another."""
        self._process = None
        if self._ended is not None:
            self._ended()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_SECONDS)
    for end in (process.stdin, process.stdout):
        if end is not None:
            with contextlib.suppress(BrokenPipeError):  # unsent data
                end.close()


def main() -> None:
    """Judge requests until standard input ends. Output of libraries goes to standard error."""
    # Only the process itself needs the computer algebra, so it is imported here and not above.
    from stretto_verify.judging import judged_here

    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            asked = msgspec.json.decode(line, type=_MathRequest)
            judged = judged_here(asked.completion, asked.gold, asked.prompt)
            replies.write(msgspec.json.encode(judged) + b"\n")
            replies.flush()


if __name__ == "__main__":
    main()
