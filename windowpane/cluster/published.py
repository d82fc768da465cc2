"""What replicas published last, by deployment and replica, in the process of an ingress.

Ray makes routers itself, from a copy of their class, so a module is where an ingress and its routers meet.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

LATEST: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
