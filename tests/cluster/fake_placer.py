"""A placer without Ray: it replies to one order after another as the file at `spec.address` says, line by line; a new
process goes on where the one before has ended. Every order is written down beside the file."""

import sys
from pathlib import Path

import msgspec

from stretto.processes.channel import Failed, RoleEnd
from stretto.processes.heartbeat import begin_role
from stretto_cluster.placing import TO_PLACER, AgentsPlaced, NotPlaced, PlaceAgents, RayPlacerSpec


def main() -> int:
    """`placed`, `refused` and `broken` are replies; `late` is one that comes with that to the next order; `fails`
    reports a user's mistake and ends; `dies` just ends."""
    spec = msgspec.json.decode(sys.argv[1], type=RayPlacerSpec)
    begin_role()
    orders: RoleEnd[PlaceAgents] = RoleEnd(spec.descriptor, TO_PLACER)
    unsaid: list[int] = []
    script, done = Path(spec.address), Path(spec.address + ".orders")
    while (order := orders.receive()) is not None:
        taken = len(done.read_text().split()) if done.exists() else 0
        with done.open("a") as file:
            file.write(f"{order.engines}\n")
        match script.read_text().split()[taken]:
            case "placed" | "placed-and-dies" as word:
                for number in (*unsaid, order.number):
                    orders.send(AgentsPlaced(nodes=(f"order-{number}",), number=number))
                unsaid = []
                if word == "placed-and-dies":
                    return 1
            case "late":
                unsaid.append(order.number)
            case "refused":
                orders.send(NotPlaced(problem="no room", exit_code=2, number=order.number))
            case "broken":
                orders.send(NotPlaced(problem="RayActorError: it is dead", exit_code=1, number=order.number))
            case "fails":
                orders.send(Failed(problem="Ray does not answer", exit_code=2))
                return 2
            case _:
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
