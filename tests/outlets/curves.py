"""What TensorBoard reads of a run's folder."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.outlets.recorded import RecordedRun


def in_tensorboard(run: RecordedRun) -> EventAccumulator:
    return EventAccumulator(str(run.folder.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def curve(run: RecordedRun, name: str) -> list[int]:
    """The steps of a curve."""
    return [point.step for point in in_tensorboard(run).Scalars(name)]
