"""Property tests take the same examples everywhere, so that a run can be repeated; long ones look for new ones."""

from __future__ import annotations

import os
import tempfile

# No test asks the Hub or looks into anyone's cache; those of the Hub run one of their own on localhost.
os.environ["HF_HUB_OFFLINE"] = "1"
# The client reads its variables when it is imported.
os.environ["HF_HUB_CACHE"] = os.path.join(tempfile.gettempdir(), "windowpane-tests-have-no-cache")

# Workers of pytest-xdist are as many as there are cores: threads of torch would only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", print_blob=True, deadline=None)
settings.load_profile("searching" if os.environ.get("WINDOWPANE_LONG") else "repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one worker runs in a row comes first: at the end, the others would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
