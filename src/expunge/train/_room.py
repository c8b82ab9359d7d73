"""What this machine has left: memory of a device, and disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Memory that this process takes now."""
    return int(psutil.Process().memory_info().rss)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on a device: of the system, its container, or the accelerator."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min([int(psutil.virtual_memory().available), *_container()])


def free_disk(path: Path) -> int:
    """Bytes free where a path is, or would be made."""
    place = path.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def same_disk(one: Path, other: Path) -> bool:
    """Whether two paths, which need not be there yet, lie on one file system."""
    devices = []
    for path in (one, other):
        place = path.expanduser().absolute()
        while not place.exists():
            place = place.parent
        devices.append(place.stat().st_dev)
    return devices[0] == devices[1]


def _container() -> list[int]:
    """What the memory limit of a container leaves; empty without one. Its file cache gives way: it does not count."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most, now = (_CGROUP / limit).read_text().strip(), int((_CGROUP / used).read_text())
            lines = dict(line.split() for line in (_CGROUP / cache).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            given_back = int(lines.get("inactive_file", lines.get("total_inactive_file", "0")))
            return [int(most) - now + given_back]
    return []
