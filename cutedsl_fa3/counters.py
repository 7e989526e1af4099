"""Counters from which persistent CTAs draw their tiles: device memory that is 0 between launches.

A launch leaves its counter as it found it, so launches that follow one another share one: each
stream has its own. A launch that a CUDA graph captures may run beside anything later, so it gets a
counter that no other launch has; these come from a block that is ready before, since nothing may be
allocated for a graph without becoming part of it.
"""

from __future__ import annotations

import threading

import torch

BLOCK = 4096  # counters that are made at once

_lock = threading.Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_spare: dict[int, list[torch.Tensor]] = {}
_blocks: list[torch.Tensor] = []  # graphs point into them, and say nothing of it

# What `torch.cuda.current_stream` and `is_current_stream_capturing` wrap: the address of a device's
# current stream, and whether a graph captures that of the current device. A torch without CUDA has
# neither.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def counter(index: int) -> torch.Tensor:
    """The counter of a launch on the current stream of device `index`.

    Shape: (1,) int32, 0.
    """
    if capturing():
        return _for_a_graph(index)
    found = _of_streams.get((index, current_stream(index)))
    return _of_a_stream(index) if found is None else found


def under_capture(device: torch.device) -> bool:
    """Whether a CUDA graph captures the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return capturing()


def _of_a_stream(index: int) -> torch.Tensor:
    made = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    with _lock:
        if len(_spare.get(index, ())) < BLOCK // 2:
            block = torch.zeros(BLOCK, dtype=torch.int32, device=f"cuda:{index}")
            torch.cuda.current_stream(index).synchronize()  # before a graph on any stream has one
            _blocks.append(block)
            _spare.setdefault(index, []).extend(block.split(1))
        return _of_streams.setdefault((index, current_stream(index)), made)


def _for_a_graph(index: int) -> torch.Tensor:
    with _lock:
        spare = _spare.get(index)
        if spare:
            return spare.pop()
    # None is left: the graph zeroes one of its own before each launch.
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
