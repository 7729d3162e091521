"""What a piece of work takes: seconds, and memory at its peak beyond what there was before.

On a GPU memory is what torch allocated there. On a CPU it is the resident memory of the process,
which Linux tells exactly; elsewhere only growth beyond the largest size so far is seen. Memory that
was freed and not given back to the system is given back first, as far as the C library can.
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

MIB = 2**20


@dataclass
class Cost:
    """Filled when the work is done.

    Args:
        seconds: By the clock on the wall.
        cpu_seconds: Of the processor, all threads together.
        mib: Memory at the peak beyond that at the start; NaN where it can't be told.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    mib: float = math.nan


@contextmanager
def metered(device: torch.device) -> Iterator[Cost]:
    """Measure what happens inside.

    Args:
        device: Where the work's tensors are.
    """
    cost = Cost()
    before = _begin(device)
    wall, processor = time.perf_counter(), time.process_time()
    try:
        yield cost
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        cost.seconds = time.perf_counter() - wall
        cost.cpu_seconds = time.process_time() - processor
        cost.mib = max(0.0, _peak(device) - before) / MIB


def _begin(device: torch.device) -> float:
    """Forget the peak so far; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _largest_so_far()


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return _status("VmHWM")
    except OSError:
        return _largest_so_far()


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"the system does not tell {name}")
    return 1024.0 * int(found[1])


def _largest_so_far() -> float:
    try:
        import resource
        import sys
    except ImportError:  # not on Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
