"""Promises of the measurement of memory: a process that the run's metrics do not have counts in each step with what it
needed before that step, and its growth is an alarm of its own."""

from benchmarks.growth import alarms_of_memory, of_roles, together
from tests.store.lines import step_line


def test_each_step_has_what_the_last_look_before_it_found() -> None:
    steps = [step_line(step, memory={"trainer": 9.0}) for step in (1, 2, 3, 4)]
    found = together(
        steps, [(0, {"outlet": 1.0}), (2, {"outlet": 2.0, "fork server": 7.0}), (3, {}), (4, {"outlet": 3.0})]
    )
    assert of_roles(found) == {
        "trainer": [(1, 9.0), (2, 9.0), (3, 9.0), (4, 9.0)],
        "outlet": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)],
        "fork server": [(3, 7.0), (4, 7.0)],
    }


def test_a_process_that_goes_on_growing_is_an_alarm_of_its_own() -> None:
    steps = [step_line(step, memory={"trainer": 500.0}) for step in range(1, 401)]
    assert alarms_of_memory(together(steps, [(0, {"fork server": 100.0, "outlet": 80.0})])) == []
    looks = [(step, {"fork server": 100.0 + step, "outlet": 80.0}) for step in range(400)]
    (alarm,) = alarms_of_memory(together(steps, looks))
    assert "fork server" in alarm
