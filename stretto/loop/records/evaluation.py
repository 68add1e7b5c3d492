"""What an evaluation measured."""

from __future__ import annotations

import msgspec

from stretto.core.records import Record


class Evaluation(Record, frozen=True):
    """What was measured. Undecided answers count as not right, and are counted apart.

    `version` is the newest version that sampled any of the tokens; `tokens` counts the answers' tokens.
    """

    version: int
    prompts: int
    right: int
    undecided: int
    tokens: int

    @property
    def accuracy(self) -> float:
        return self.right / self.prompts

    def __str__(self) -> str:
        note = f", {self.undecided} undecided" if self.undecided else ""
        return f"accuracy {self.accuracy:.4f}: {self.right} of {self.prompts} right{note}"

    def as_json(self) -> str:
        """One object with every field and the accuracy."""
        return msgspec.json.encode(msgspec.structs.asdict(self) | {"accuracy": self.accuracy}).decode()
