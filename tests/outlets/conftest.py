"""Tests of this folder may be coroutines."""

from __future__ import annotations

from tests.asynchronous import pytest_pyfunc_call as pytest_pyfunc_call
