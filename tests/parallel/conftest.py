from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from windowpane.parallel.launch import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Two ranks, this process and another. One model after another is loaded into the same two."""
    pair = Workers([torch.device("cpu")] * 2)
    yield pair
    pair.close()
