"""A step on record, and the recipe that it is of: for processes that start quickly."""

from msgspec.structs import replace

from stretto.store.ledger.ledger import Ledger
from tests.store.make import Make

RECIPE = """
[rollout]
batch_size = 1
group_size = 2
min_group_size = 1
max_staleness = 1.0
beyond_bound = "mask"
max_attempts = 3
"""


def one_step(ledger: Ledger, step: int) -> None:
    make, name = Make(), f"0.{step}.0"
    answers = [make.trajectory(name, member, versions=(step - 1,) * 3) for member in (0, 1)]
    group = replace(make.group(name, *answers), prompt=replace(make.prompt, id=str(step)))
    ledger.issue(name, group.prompt, 2, step - 1)
    ledger.buffer(group)
    ledger.commit_batch(make.batch(step, group))
    ledger.record_update(make.update(step))
