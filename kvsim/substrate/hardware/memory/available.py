"""Available host memory and disk space."""

from pathlib import Path
from shutil import disk_usage

GIB = 1 << 30


def available_bytes() -> int:
    """Return the memory that the system has available and the control group allows."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        idle = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(idle["inactive_file"]) + int(idle["active_file"])
        return available if limit == "max" else min(available, int(limit) - int(used) + reclaimable)
    except (OSError, KeyError, ValueError):
        return available


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system, counting the folder's own files as free. The folder need not exist."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    own = sum(path.stat().st_blocks * 512 for path in folder.glob("*") if path.is_file())
    return disk_usage(existing).free + own


def gib(n_bytes: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / (1 << 20):,.1f} MiB"
