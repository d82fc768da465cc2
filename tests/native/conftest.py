"""Says which instruction sets the tests of this directory run, and runs them on two threads, whatever others have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.native.instruction_sets import summary


def pytest_report_header() -> str:
    return summary()


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """Kernels cut their work by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
