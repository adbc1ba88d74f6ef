"""The rule that chooses, by page size, the method that copies pages between GPU and host."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from kvsim.numbers import Real, Whole, check_number

Method = Literal["kernel", "staged", "memcpy"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(kw_only=True)
class CopyRule:
    """Chooses the copy method by page size, as measured by ``kvsim calibrate``. The defaults suit an H200.

    kernel   a kernel reads or writes host pages over the bus: works for any page, but occupies multiprocessors
    staged   copy engines move whole host pages; a kernel scatters or gathers them in GPU memory
    memcpy   copy engines move each page to its places, its layers as the rows of a block; no multiprocessor is used

    Where layers are 2 GiB or more apart on the GPU, or the driver is older than CUDA 13.0, memcpy moves each fragment by itself,
    which is slower, and fragments below 32 KiB are staged instead.

    Products beside copies took 1.1 to 1.65 times as long with the kernel, 1.06 times at most with staging, and 1.04 times with
    memcpy of fragments of 64 KiB or more.
    """

    programs: int = 4
    """Programs of the copy kernel; each keeps 96 KiB in flight."""
    memcpy_fragment_bytes: int = 1 << 15
    """Minimum fragment size for memcpy."""
    staged_load_page_bytes: int = 1 << 16
    """Minimum page size (all layers) for staging on the way to the GPU, where memcpy does not apply."""
    staged_store_page_bytes: int = 1 << 16
    """Minimum page size (all layers) for staging on the way to the host, where memcpy does not apply."""
    staged_load_beside_store_page_bytes: int = 1 << 15
    """Like ``staged_load_page_bytes``, while pages are also on their way to the host: two kernels share the link worse than a
    kernel and a copy engine."""
    store_beside_load_bytes_per_s: float = 47e9
    """Rate to which a kernel that writes to the host throttles itself while pages are also on their way to the GPU: the read
    requests of that copy use the same direction."""

    def __post_init__(self) -> None:
        for field in fields(self):
            number = Real(above=0) if field.name.endswith("_per_s") else Whole(1)
            check_number(f"copy_rule.{field.name}", number, getattr(self, field.name))

    def load_method(self, fragment_bytes: int, page_bytes: int, *, is_shared: bool) -> Method:
        """Return the method that copies pages of ``page_bytes`` (all layers) to the GPU; ``is_shared``: pages are also stored."""
        staged = self.staged_load_beside_store_page_bytes if is_shared else self.staged_load_page_bytes
        return self._method(fragment_bytes, page_bytes, staged)

    def store_method(self, fragment_bytes: int, page_bytes: int) -> Method:
        """Return the method that copies pages of ``page_bytes`` (all layers) to the host."""
        return self._method(fragment_bytes, page_bytes, self.staged_store_page_bytes)

    def _method(self, fragment_bytes: int, page_bytes: int, staged_page_bytes: int) -> Method:
        if fragment_bytes >= self.memcpy_fragment_bytes:
            return "memcpy"
        return "staged" if page_bytes >= staged_page_bytes else "kernel"
