"""`python -m windowpane`."""

from __future__ import annotations

import sys

from windowpane.cli.main import main

sys.exit(main())
