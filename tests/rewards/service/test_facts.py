"""What workers say of their reward: the first speaks for all, and one that says something else is reported once."""

from stretto.rewards.service.wire import Facts

STRONG, WEAK = {"sandbox": "sandbox level A (warm)"}, {"sandbox": "sandbox level D (warm)"}


def test_workers_that_agree_are_no_news() -> None:
    facts = Facts()
    assert [facts.hear(f"rewards-{number}", STRONG) for number in range(3)] == [[], [], []]
    assert facts.known == STRONG


def test_a_weaker_sandbox_after_a_restart_is_told_and_on_record() -> None:
    facts = Facts()
    facts.hear("rewards-0", STRONG)
    told = "rewards-0 works with another sandbox: sandbox level D (warm), in place of sandbox level A (warm)"
    assert facts.hear("rewards-0", WEAK) == [told]
    assert facts.hear("rewards-0", WEAK) == []
    assert facts.known == STRONG | {"sandbox of rewards-0": "sandbox level D (warm)"}


def test_what_only_a_later_worker_says_is_told_and_on_record() -> None:
    facts = Facts()
    facts.hear("rewards-0", STRONG)
    told = "rewards-1 works with judge: 8B, of which the first worker reported nothing"
    assert facts.hear("rewards-1", STRONG | {"judge": "8B"}) == [told]
    assert facts.known == STRONG | {"judge of rewards-1": "8B"}


def test_a_reward_that_says_nothing_has_no_facts() -> None:
    facts = Facts()
    assert facts.hear("rewards-0", {}) == []
    assert facts.known == {}
