"""What adapters add to products in Triton's interpreter, against plain torch. Run by its test."""

from __future__ import annotations

import torch

from bench.gpu_checks.adapters import added
from windowpane.models.adapters import AdapterShape


def main() -> None:
    torch.set_num_threads(1)
    for outputs, inputs, rows, rank in (((40, 24, 8), 1100, 37, 20), ((150, 150), 40, 37, 3), ((24,), 1100, 1500, 3)):
        added(AdapterShape(1, outputs, inputs), rows, rank, "cpu", torch.float32)


if __name__ == "__main__":
    main()
