"""What commands share: panels of their help, and errors that are the user's to mend."""

from __future__ import annotations

from pathlib import Path

MEMORY, SCHEDULING, DEVICE, OUTPUT = "Memory", "Scheduling", "Device", "Output"
SAMPLING, WORKLOAD, SERVER, TEXT = "Sampling", "Workload", "Server", "Chat, tools and reasoning"


class UserError(Exception):
    """What was asked for cannot be done; the message says why, and what works."""


def check_plot_file(plot: str | None) -> None:
    """Refuse a picture that could not be written, before anything is computed for it."""
    if plot is None:
        return
    if Path(plot).suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot {plot}: pictures are PNG or SVG; write for example --plot plan.png")
    if not Path(plot).resolve().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no directory {Path(plot).parent}")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'windowpane[plot]' (or pip install matplotlib)")
