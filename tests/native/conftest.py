"""Says which instruction sets the tests of this directory run."""

from __future__ import annotations

from tests.native.instruction_sets import summary


def pytest_report_header() -> str:
    return summary()
