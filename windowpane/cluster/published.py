"""What replicas published last, by replica, in the process of an ingress.

Ray makes routers itself, from a copy of their class, so a module is where an ingress and its router meet.
"""

from __future__ import annotations

from typing import Any

LATEST: dict[str, dict[str, Any]] = {}
