"""A role that tells its log what it was started with, and ends: ``python -m tests.cluster.telling_role SPEC``."""

import sys

from stretto.processes.heartbeat import begin_role

if __name__ == "__main__":
    begin_role()
    print(sys.argv[1], flush=True)
