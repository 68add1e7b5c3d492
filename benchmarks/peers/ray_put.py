"""How fast Ray moves an array of bytes to another node, in its own environment; imports nothing of stretto.

    PEER=$(python benchmarks/peers/environment.py ray)
    "$PEER" benchmarks/peers/ray_put.py --threads 1 --bytes 7000000 270000000

There are two nodes on this machine, each with its own object store. `put` copies the array into the store of the first;
`get` is timed in a task on the second, until it has the array and has read one byte. Prints one JSON object as the last
line of standard output: ``{"rows": [{"bytes": 270000000, "put": 0.2, "get": 0.5}, ...], "version": "2.60.0"}``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from importlib.metadata import version
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_raylet_start_wait_time_s": "120"}

import numpy as np
import ray  # reads the variables above
from ray.cluster_utils import Cluster

STORE = 2 << 30


class Reader:
    """Actor on the second node."""

    def read(self, refs: list[Any]) -> tuple[float, int]:
        """Seconds until the array has arrived, and its size."""
        start = time.perf_counter()
        array = ray.get(refs[0])
        size = int(array.nbytes) + int(array[-1]) * 0
        return time.perf_counter() - start, size


def main() -> None:
    parser = argparse.ArgumentParser(description="Ray's object store as the peer of the mailbox over a network")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bytes", type=int, nargs="+", default=[7_000_000, 270_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={"away": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        reader: Any = ray.remote(Reader).options(resources={"away": 1}, num_cpus=0).remote()
        ray.get(reader.read.remote([ray.put(np.zeros(10, np.uint8))]))
        rows = []
        for size in words.bytes:
            puts, gets = [], []
            for number in range(words.rounds):
                array = np.full(size, number, np.uint8)
                start = time.perf_counter()
                ref = ray.put(array)
                puts.append(time.perf_counter() - start)
                took, read = ray.get(reader.read.remote([ref]))
                assert read == size
                gets.append(took)
                del ref
            rows.append({"bytes": size, "put": statistics.median(puts), "get": statistics.median(gets)})
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"rows": rows, "version": version("ray")}))


if __name__ == "__main__":
    main()
