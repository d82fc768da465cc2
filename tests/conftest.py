"""Property tests take the same examples everywhere, so that a run can be repeated; long ones look for new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", print_blob=True, deadline=None)
settings.load_profile("searching" if os.environ.get("WINDOWPANE_LONG") else "repeatable")
