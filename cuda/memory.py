"""How much memory there is for a KV cache, on a CUDA device and on the host, and how many blocks that makes.

Knows torch and the kernel's files, no model and no configuration. Sizes are in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

#: On the host a KV cache takes this share of what is available: the rest is for activations and for everybody else.
HOST_SHARE: Final = 0.5
#: And no more than this, unless a size is asked for: others live on the machine too.
HOST_CAP_BYTES: Final = 4 * 1024**3


#: What torch's allocators say, on a CPU and through CUDA, and CUDA's libraries, which allocate by themselves.
_SIGNS: Final = (
    "_status_alloc_failed",
    "alloc_cpu",
    "defaultcpuallocator",
    "not enough memory",
    "out of memory",
    "size calculation overflowed",
)


class MemoryShortageError(Exception):
    """There is not enough memory; the message says what to lower."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, which torch tells in several ways."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """What `run` takes at most beside what is allocated; 0 on a device where that is not counted."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    """What nobody has of a CUDA device's memory."""
    return torch.cuda.mem_get_info(device)[0]


def cuda_kv_bytes(device: torch.device, utilization: float, *, activation_bytes: int) -> int:
    """What is left for a KV cache once the model is loaded and `activation_bytes` are kept for a step.

    `utilization` is the share of the device's whole memory that everything on it, other processes too, may take.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free) - activation_bytes)


def host_kv_bytes() -> int:
    """HOST_SHARE of the memory available on the host, at most HOST_CAP_BYTES."""
    return min(int(host_available_bytes() * HOST_SHARE), HOST_CAP_BYTES)


def host_available_bytes(root: Path = Path("/")) -> int:
    """What the host's kernel calls available, or less where a control group limits this process.

    `root` is where /proc and /sys are looked for.
    """
    available = _meminfo_available(root)
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available, *_cgroup_headrooms(root)]))


def num_blocks_for(budget_bytes: int, block_bytes: int, *, min_blocks: int, max_blocks: int, advice: str) -> int:
    """How many blocks fit, at most `max_blocks`. Raises MemoryShortageError, with `advice`, for under `min_blocks`."""
    fitting = budget_bytes // block_bytes
    if fitting < min_blocks:
        raise MemoryShortageError(
            f"{budget_bytes / 2**20:.0f} MiB for the KV cache hold {fitting} blocks of {block_bytes / 2**20:.2f} MiB; "
            f"at least {min_blocks} are needed: {advice}"
        )
    return min(fitting, max_blocks)


def _meminfo_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit less use for each control group, of version 1 or 2, that this process is in, up to the outermost."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            yield from _headrooms(root / "sys/fs/cgroup", path, files)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _headrooms(root / "sys/fs/cgroup/memory", path, files)


def _headrooms(mount: Path, path: str, files: tuple[str, str, str]) -> Iterator[int]:
    limit_name, usage_name, reclaimable_name = files
    group = mount / path.lstrip("/")
    # Inside a container the path may be the host's, which is not there: then the mount itself is this group.
    for folder in (group, *group.parents):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            yield limit - (usage - _statistic(folder / "memory.stat", reclaimable_name))
        if folder == mount:
            return


def _statistic(path: Path, name: str) -> int:
    """0 where there is none. Pages of files read long ago count as used, but give way."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """None where there is no such file, or where it says `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
