"""An agent in a process of its own, which starts at once: ``python -m tests.cluster.lone_agent ADDRESS TOKEN TLS``."""

import asyncio
import signal
import sys

from stretto_cluster.agent import Offer, run_agent


async def main() -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    address, token, tls = sys.argv[1:]

    def say(text: str) -> None:
        print(text, flush=True)

    say(f"over: {await run_agent(Offer(address, token, tls=tls, patience=30.0), say, leave)}")


if __name__ == "__main__":
    asyncio.run(main())
