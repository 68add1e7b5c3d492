"""Settings of code rewards."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

LevelName = Literal["A", "B", "C", "D", "E"]


_TEST = (
    "seconds of CPU time for one test, or ten times as long by the clock, at most 60 s more; "
    "all calls of a test count together"
)
_ALL_TESTS = "seconds of CPU time for all tests of one completion"


class SandboxConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[rewards.code]`` of a recipe: resource limits of a program, and the required sandbox level."""

    seconds: float = Field(2.0, gt=0, le=600, description=_TEST)
    completion_seconds: float = Field(10.0, gt=0, le=3600, description=_ALL_TESTS)
    memory_mib: int = Field(
        512, ge=64, le=1 << 20, description="MiB of address space of each process, and of memory of all processes"
    )
    processes: int = Field(16, ge=1, le=4096, description="most processes and threads; level D allows threads only")
    open_files: int = Field(64, ge=16, le=4096, description="most open files of one program")
    files_mib: int = Field(16, ge=1, le=1 << 16, description="MiB of /tmp, and of the largest file")
    output_mib: int = Field(
        4, ge=1, le=256, description="MiB of output, and of error output, after which the program is ended"
    )
    warm: bool = Field(True, description="fork programs from a warm interpreter; false: a new sandbox for each")
    lowest_level: LevelName = Field("D", description="refuse to start with a weaker sandbox")
    unsafe: bool = Field(False, description="allow level E, which has no protection; never as root")

    @model_validator(mode="before")
    @classmethod
    def _read_its_older_name(cls, section: Any) -> Any:
        if isinstance(section, dict) and "answer_seconds" in section:
            section = {("completion_seconds" if key == "answer_seconds" else key): section[key] for key in section}
        return section

    @model_validator(mode="after")
    def _one_test_fits(self) -> Self:
        if self.seconds > self.completion_seconds:
            found = f"seconds = {self.seconds:g} is more than completion_seconds = {self.completion_seconds:g}"
            raise ValueError(found)
        if self.lowest_level == "E" and not self.unsafe:
            raise ValueError('lowest_level = "E" needs unsafe = true')
        return self
