"""Between host and device without waiting: copies by pinned memory, which the allocator keeps until they are done."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of these values (an array, or what `torch.tensor` takes) on the device, without waiting for it."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Transfer:
    """Everything a step sends to the device, in one copy from pinned memory: arrays go in, device views come out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[Ints] = []
        self._total = 0

    def add(self, array: NDArray[Any]) -> int:
        """Put an array on the list; returns the handle that `send`'s result is indexed with."""
        values = np.ascontiguousarray(array, dtype=np.int32)
        self._arrays.append(values)
        return len(self._arrays) - 1

    def send(self) -> list[torch.Tensor]:
        """int32 views on the device, shaped as they were put in. Each starts at a multiple of 16 bytes."""
        starts, end = [], 0
        for array in self._arrays:
            starts.append(end)
            end += -(-array.size // 4) * 4
        pinned = self._device.type == "cuda"
        host = torch.empty(end, dtype=torch.int32, pin_memory=pinned)
        flat = host.numpy()
        for start, array in zip(starts, self._arrays, strict=True):
            flat[start : start + array.size] = array.reshape(-1)
        # The allocator keeps pinned memory until the copy is done, and the next step's may already be filled.
        device = host.to(self._device, non_blocking=True) if pinned else host
        return [
            device[start : start + array.size].view(array.shape)
            for start, array in zip(starts, self._arrays, strict=True)
        ]


class HostCopy:
    """A tensor on its way to the host; `array` waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._landed: torch.Event | None = None
        if tensor.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._landed = torch.Event(tensor.device)
            self._landed.record()
            tensor = host
        self._tensor = tensor

    def array(self) -> NDArray[Any]:
        if self._landed is not None:
            self._landed.synchronize()
        array: NDArray[Any] = self._tensor.cpu().numpy()
        return array
