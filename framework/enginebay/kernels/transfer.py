"""Host arrays to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy `array` to `device`; on CPU the tensor shares its memory.

    The copy goes through pinned memory, whose allocator holds a page back until its copy has run: the caller may drop or
    reuse `array` at once, and steps in flight need no fence of their own.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
