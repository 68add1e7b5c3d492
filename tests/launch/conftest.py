"""One cache of built models for all system tests of a session."""

from __future__ import annotations

from tests.launch.running import laboratory as laboratory
