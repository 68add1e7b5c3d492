"""All attacks, and one honest program that must work.

They run before any model's program, to find the walls that hold. The list follows attacks known to get through plain
subprocesses, containers or bubblewrap alone.
"""

from __future__ import annotations

from stretto_verify.sandbox.attacks.limits import ATTACKS_ON_LIMITS
from stretto_verify.sandbox.attacks.walls import ATTACKS_ON_WALLS

ATTACKS = (*ATTACKS_ON_WALLS, *ATTACKS_ON_LIMITS)

#: An honest program, which every sandbox must be able to run.
HONEST = """
import math, re, threading, collections, heapq, functools, itertools
worker = threading.Thread(target=lambda: print(sum(map(int, input().split())) + math.comb(4, 2)))
worker.start()
worker.join()
"""
