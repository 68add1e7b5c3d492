"""What a run says about its libraries and its machine."""

from __future__ import annotations

import os
import platform

from stretto.store.folder.provenance import library_versions, machine


def test_the_libraries_that_matter_are_named() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert {"torch", "transformers", "msgspec"} <= versions.keys()


def test_the_machine_is_described_by_what_may_be_used() -> None:
    found = machine()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_gib > 0
    assert found.processor
