"""A role that tells its log what it was started with, once or as often as the variable TIMES says, and ends: ``python
-m tests.cluster.telling_role SPEC``."""

import os
import sys

from stretto.processes.heartbeat import begin_role

if __name__ == "__main__":
    begin_role()
    print(sys.argv[1] * int(os.environ.get("TIMES", "1")), flush=True)
