"""Promise: a small model learns to use a tool through the gateway from an unchanged program of openai-agents, as
`recipes/calculator_agent.toml` says: without the tool it cannot answer, before the run it seldom uses it."""

from pathlib import Path

import pytest

from benchmarks.calculator import learn


@pytest.mark.timeout(1800)
def test_a_small_model_learns_to_use_the_calculator(agents: Path, tmp_path: Path) -> None:
    learnt = learn(agents, tmp_path)
    assert learnt.initial_accuracy < 0.5
    assert learnt.final_accuracy >= 0.9
    assert learnt.with_tool >= 0.9
    assert learnt.without_tool < 0.1
    assert learnt.laws_kept
