"""Common cards: what a planner needs to know of each.

Memory is the total that CUDA reports (`cudaMemGetInfo`, which is also what PyTorch prints as "total capacity"), because
that is what `--gpu-memory-utilization` multiplies. It is smaller than nvidia-smi's total by what the driver keeps for
itself (an H200 shows 143,771 MiB there and 139.80 GiB here), and moves by up to 1 % between drivers and with ECC:
`--gpu-memory` overrides it. The figures are those of PyTorch's out-of-memory messages in public reports (Linux, no
display attached).

Bandwidth, arithmetic and compute capability are from NVIDIA's data sheets and architecture white papers (Volta, Turing,
Ampere GA100 and GA102, Ada, Hopper, Blackwell, RTX Blackwell) and the CUDA table of compute capabilities. Arithmetic is
dense (never the doubled "with sparsity" figure) tensor-core bf16 with fp32 accumulation at boost clock; fp16 on cards
before Ampere, which have no bf16.

AMD's cards and Apple's chips are here for planning alone: nothing of this package runs on them. Of unified memory macOS
lets the GPU have a share, which Metal reports as `recommendedMaxWorkingSetSize`: three quarters or more, by size and
release. A DGX Spark's 121.69 GiB are what CUDA reports, and the operating system lives in them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """`name` is what `--gpu` takes; `capability` is CUDA's (major, minor), None for cards of other makers."""

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    flops_per_s: int
    capability: tuple[int, int] | None


def _card(
    name: str,
    title: str,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    tflops: float,
    capability: tuple[int, int] | None,
) -> Gpu:
    return Gpu(name, title, int(memory_gib * 2**30), int(bandwidth_gb_per_s * 1e9), int(tflops * 1e12), capability)


_CARDS = (
    # Data centre. Sources: the product data sheets; GA100, GH100 and Blackwell architecture white papers.
    _card("v100-16gb", "Tesla V100 SXM2 16 GB", 15.77, 900, 125, (7, 0)),
    _card("v100-32gb", "Tesla V100 SXM2 32 GB", 31.73, 900, 125, (7, 0)),
    _card("t4", "Tesla T4", 14.58, 320, 65, (7, 5)),
    _card("a10", "A10", 22.05, 600, 125, (8, 6)),
    _card("a10g", "A10G", 22.05, 600, 70, (8, 6)),
    _card("a40", "A40", 44.43, 696, 149.7, (8, 6)),
    _card("a100-40gb", "A100 SXM4 40 GB", 39.39, 1555, 312, (8, 0)),
    _card("a100-80gb", "A100 SXM4 80 GB", 79.15, 2039, 312, (8, 0)),
    _card("a100-80gb-pcie", "A100 PCIe 80 GB", 79.15, 1935, 312, (8, 0)),
    _card("l4", "L4", 22.03, 300, 121, (8, 9)),
    _card("l40", "L40", 44.39, 864, 181, (8, 9)),
    _card("l40s", "L40S", 44.39, 864, 362, (8, 9)),
    _card("h100", "H100 SXM5 80 GB", 79.11, 3350, 989.4, (9, 0)),
    _card("h100-pcie", "H100 PCIe 80 GB", 79.11, 2039, 756, (9, 0)),
    _card("h100-nvl", "H100 NVL 94 GB", 93.11, 3938, 835, (9, 0)),
    _card("h20", "H20 96 GB", 95.10, 4000, 148, (9, 0)),
    _card("gh200", "GH200 96 GB", 94.50, 4000, 989.4, (9, 0)),
    _card("h200", "H200 SXM 141 GB", 139.80, 4800, 989.4, (9, 0)),
    _card("b200", "B200 SXM 180 GB", 178.35, 8000, 2250, (10, 0)),
    # 288 GB by the data sheet, 275,040 MiB by nvidia-smi. Rates: the HGX B300 data sheet.
    _card("b300", "B300 SXM 288 GB", 267.69, 8000, 2250, (10, 3)),
    # Unified memory, shared with the operating system: vLLM logs some 102 GiB of it free at start. Bandwidth: NVIDIA's
    # specification page; bf16 is an eighth of its sparse FP4 petaflop.
    _card("gb10", "GB10 (DGX Spark)", 121.69, 273, 125, (12, 1)),
    # Workstation. Sources: the product data sheets; RTX Blackwell PRO white paper.
    _card("a6000", "RTX A6000", 47.53, 768, 154.8, (8, 6)),
    _card("6000-ada", "RTX 6000 Ada", 47.50, 960, 364.2, (8, 9)),
    _card("pro-6000", "RTX PRO 6000 Blackwell", 94.97, 1792, 503.8, (12, 0)),
    # GeForce. Sources: the GA102, Ada and RTX Blackwell architecture white papers; half the fp16-accumulation rate.
    _card("2080-ti", "GeForce RTX 2080 Ti", 10.75, 616, 53.8, (7, 5)),
    _card("3060", "GeForce RTX 3060 12 GB", 11.76, 360, 25.5, (8, 6)),
    _card("3080", "GeForce RTX 3080 10 GB", 9.77, 760.3, 59.5, (8, 6)),
    _card("3080-12gb", "GeForce RTX 3080 12 GB", 11.76, 912.4, 61.3, (8, 6)),
    _card("3090", "GeForce RTX 3090", 23.68, 936.2, 71, (8, 6)),
    _card("3090-ti", "GeForce RTX 3090 Ti", 23.67, 1008, 80, (8, 6)),
    _card("4060-ti-16gb", "GeForce RTX 4060 Ti 16 GB", 15.60, 288, 44.1, (8, 9)),
    _card("4070-ti", "GeForce RTX 4070 Ti", 11.73, 504.2, 80.2, (8, 9)),
    _card("4070-ti-super", "GeForce RTX 4070 Ti SUPER", 15.70, 672.3, 88.2, (8, 9)),
    _card("4080", "GeForce RTX 4080", 15.70, 716.8, 97.5, (8, 9)),
    _card("4080-super", "GeForce RTX 4080 SUPER", 15.70, 736.3, 104.4, (8, 9)),
    _card("4090", "GeForce RTX 4090", 23.65, 1008, 165.2, (8, 9)),
    _card("5060-ti-16gb", "GeForce RTX 5060 Ti 16 GB", 15.45, 448, 47.4, (12, 0)),
    _card("5070-ti", "GeForce RTX 5070 Ti", 15.47, 896, 87.9, (12, 0)),
    _card("5080", "GeForce RTX 5080", 15.47, 960, 112.6, (12, 0)),
    _card("5090", "GeForce RTX 5090", 31.37, 1792, 209.5, (12, 0)),
    # AMD Instinct: totals of PyTorch's "HIP out of memory" messages; bandwidth and dense bf16 of AMD's data sheets.
    _card("mi300x", "Instinct MI300X 192 GB", 191.98, 5300, 1307.4, None),
    _card("mi325x", "Instinct MI325X 256 GB", 255.98, 6000, 1307.4, None),
    _card("mi355x", "Instinct MI355X 288 GB", 287.98, 8000, 2516.6, None),
    # Apple: published rates, fp16 at twice fp32. llama.cpp logs a working set of 115,448.73 MB on an M4 Max of 128 GB;
    # the others are three quarters, which older releases of macOS gave to all.
    _card("m4-pro-48gb", "Apple M4 Pro 48 GB", 36, 273, 18.4, None),
    _card("m4-max-64gb", "Apple M4 Max 64 GB", 48, 546, 36.9, None),
    _card("m4-max-128gb", "Apple M4 Max 128 GB", 107.52, 546, 36.9, None),
    _card("m3-ultra-256gb", "Apple M3 Ultra 256 GB", 192, 819, 56.7, None),
    _card("m3-ultra-512gb", "Apple M3 Ultra 512 GB", 384, 819, 56.7, None),
)

GPUS: dict[str, Gpu] = {card.name: card for card in _CARDS}

# Other spellings, nvidia-smi's product names among them, as `_squeeze` leaves them. `a100` and `v100` alone are left
# out on purpose: they come in two sizes, and guessing wrong doubles or halves the answer.
_ALIASES = {
    "v100sxm216gb": "v100-16gb",
    "v100pcie16gb": "v100-16gb",
    "v100sxm232gb": "v100-32gb",
    "v100pcie32gb": "v100-32gb",
    "a100sxm440gb": "a100-40gb",
    "a100pcie40gb": "a100-40gb",
    "a10040gbpcie": "a100-40gb",
    "a100sxm480gb": "a100-80gb",
    "a10080gbsxm": "a100-80gb",
    "a100pcie80gb": "a100-80gb-pcie",
    "h100sxm": "h100",
    "h100sxm5": "h100",
    "h10080gb": "h100",
    "h10080gbhbm3": "h100",
    "h10080gbsxm": "h100",
    "h10080gbpcie": "h100-pcie",
    "h10094gb": "h100-nvl",
    "h200sxm": "h200",
    "h200141gb": "h200",
    "h2096gb": "h20",
    "gh200480gb": "gh200",
    "gh20096gb": "gh200",
    "b200180gb": "b200",
    "b300288gb": "b300",
    "b300sxm": "b300",
    "b300sxm6ac": "b300",
    "dgxspark": "gb10",
    "mi300x192gb": "mi300x",
    "mi300xoam": "mi300x",
    "mi300xvf": "mi300x",
    "mi325x256gb": "mi325x",
    "mi355x288gb": "mi355x",
    "6000adageneration": "6000-ada",
    "ada6000": "6000-ada",
    "pro6000blackwell": "pro-6000",
    "pro6000blackwellworkstationedition": "pro-6000",
    "pro6000blackwellserveredition": "pro-6000",
    "306012gb": "3060",
    "308010gb": "3080",
    "309024gb": "3090",
    "409024gb": "4090",
    "509032gb": "5090",
}

_COUNTED = re.compile(r"\s*(?:([0-9]+)\s*[x×*]\s*)?(.*?)\s*", re.IGNORECASE)
_VENDOR_WORDS = ("nvidia", "geforce", "tesla", "rtx", "amd", "instinct", "apple")


def parse_gpus(text: str, also: tuple[str, ...] = ()) -> tuple[int, Gpu]:
    """`2x3090`, `h200`, `4×A100-80GB`, `NVIDIA GeForce RTX 4090` → (count, card).

    Raises ValueError for a count of 0 and for an unknown card; the latter names close matches, what the caller takes
    `also`, and every known card.
    """
    match = _COUNTED.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read GPU {text!r}; write for example h200 or 2x3090")
    count = int(match[1] or 1)
    if count < 1:
        raise ValueError(f"GPU count in {text!r} must be at least 1; write for example h200 or 2x3090")
    return count, _find(match[2], also)


def _find(text: str, also: tuple[str, ...]) -> Gpu:
    squeezed = _squeeze(text)
    for card in _CARDS:
        if squeezed == _squeeze(card.name):
            return card
    if squeezed in _ALIASES:
        return GPUS[_ALIASES[squeezed]]
    raise ValueError(_unknown(text, squeezed, also))


def _squeeze(text: str) -> str:
    """Lower case, letters and digits only, without the words that every card of a line shares."""
    squeezed = re.sub(r"[^a-z0-9]", "", text.lower())
    for word in _VENDOR_WORDS:
        squeezed = squeezed.removeprefix(word)
    return squeezed


def _unknown(text: str, squeezed: str, also: tuple[str, ...]) -> str:
    from difflib import get_close_matches  # only here: a plan that names a known card does not pay for it

    spellings = {_squeeze(card.name): card.name for card in _CARDS}
    sizes = [name for spelling, name in spellings.items() if squeezed and spelling.startswith(squeezed)]
    close = sizes or [spellings[s] for s in get_close_matches(squeezed, spellings, n=3, cutoff=0.7)]
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return (
        f"unknown GPU {text!r}{hint} Known: {', '.join((*also, *GPUS))}. "
        "For any other card give its memory with --gpu-memory, for example --gpu-memory 24GiB"
    )
