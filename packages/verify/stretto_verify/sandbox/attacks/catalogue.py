"""All attacks, and the one program that must work.

They are run before any model's program is, to learn which walls hold. The list follows the attacks that are known to
get through plain subprocesses, containers or bubblewrap alone.
"""

from __future__ import annotations

from stretto_verify.sandbox.attacks.limits import ATTACKS_ON_LIMITS
from stretto_verify.sandbox.attacks.walls import ATTACKS_ON_WALLS

ATTACKS = (*ATTACKS_ON_WALLS, *ATTACKS_ON_LIMITS)

#: Must work wherever attacks are stopped.
HONEST = """
import math, re, threading, collections, heapq, functools, itertools
worker = threading.Thread(target=lambda: print(sum(map(int, input().split())) + math.comb(4, 2)))
worker.start()
worker.join()
"""
