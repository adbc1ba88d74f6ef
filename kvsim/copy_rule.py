"""Which method copies pages between GPU and host, by their size."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

Method = Literal["kernel", "staged", "memcpy"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(kw_only=True)
class CopyRule:
    """Which method copies pages of which size, as measured by ``kvsim calibrate``. The defaults are those of an H200.

    kernel   a kernel reads or writes the host's pages over the bus: any page, but it takes multiprocessors from others
    staged   copy engines move whole host pages, a kernel gathers or scatters them in GPU memory
    memcpy   copy engines move every fragment to its place: no multiprocessor is used
    """

    programs: int = 4
    """Programs of the kernel. Each keeps 128 KiB in flight."""
    memcpy_fragment_bytes: int = 1 << 15
    """Fragments at least so long are copied by memcpy."""
    staged_load_page_bytes: int = 1 << 16
    """Other pages at least so long in the host's pool, all layers, are staged on their way to the GPU."""
    staged_store_page_bytes: int = 1 << 20
    """The same on their way to the host."""
    staged_load_beside_store_page_bytes: int = 1 << 16
    """The same to the GPU while pages are on their way to the host: two kernels share the link worse than two kinds of engine."""
    store_bytes_per_s: float = 52.3e9
    """Rate to which a kernel holds itself back when it writes to the host: just below what the link takes."""
    store_beside_load_bytes_per_s: float = 47e9
    """The same while pages are on their way to the GPU, whose read requests go the same way."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"copy_rule.{field.name} must be above 0, not {value}")

    def load_method(self, fragment_bytes: int, page_bytes: int, *, is_shared: bool) -> Method:
        """How pages of ``page_bytes`` (all layers) get to the GPU."""
        staged = self.staged_load_beside_store_page_bytes if is_shared else self.staged_load_page_bytes
        return self._method(fragment_bytes, page_bytes, staged)

    def store_method(self, fragment_bytes: int, page_bytes: int) -> Method:
        """How pages of ``page_bytes`` (all layers) get to the host."""
        return self._method(fragment_bytes, page_bytes, self.staged_store_page_bytes)

    def _method(self, fragment_bytes: int, page_bytes: int, staged_page_bytes: int) -> Method:
        if fragment_bytes >= self.memcpy_fragment_bytes:
            return "memcpy"
        return "staged" if page_bytes >= staged_page_bytes else "kernel"
