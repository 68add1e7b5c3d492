"""Run the tests of the last pytest again that failed, alone: a failure that stays is the code's.

    python -m tests.alone CODE                 CODE: pytest's exit code

Nothing but load differs between the two runs, so a test that passes alone is reported as one to be mended, and is no
error (decision 32). More than three failures are never put down to load.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

MOST = 3
FAILED = Path(".cache/pytest/v/cache/lastfailed")


def repeat(code: int) -> int:
    """The exit code of the whole, after the failed tests have run again where that can tell something."""
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    failed = sorted(json.loads(FAILED.read_text(encoding="utf-8")))
    if not 0 < len(failed) <= MOST:
        return code
    print(f"\nonce more, alone: {', '.join(failed)}", flush=True)
    code = pytest.main(["--last-failed", "--last-failed-no-failures=none", *{name.split("::")[0] for name in failed}])
    if code == pytest.ExitCode.OK:
        print(f"\nFAILED BESIDE OTHER TESTS, PASSED ALONE, to be mended: {', '.join(failed)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(repeat(int(sys.argv[1])))
