"""What adapters add to products in Triton's interpreter, against plain torch. Run by its test."""

from __future__ import annotations

import torch

from bench.gpu_checks.adapters import added
from windowpane.models.adapters import AdapterShape


def main() -> None:
    torch.set_num_threads(1)
    shapes = AdapterShape(1, (40, 24, 8), 300), AdapterShape(1, (150, 150), 40), AdapterShape(1, (24,), 1100)
    for shape in shapes:
        for rows, rank in ((1, 3), (37, 20)):
            added(shape, rows, rank, "cpu", torch.float32)


if __name__ == "__main__":
    main()
