"""No prefetch."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy, Refusal


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class NoPrefetch(PrefetchPolicy):
    """Reads nothing ahead: an admitted request reads from CPU and disk whatever it can reuse, while it runs.

    while waiting   nothing
    at admission    everything that is stored, through the CPU tier
    """

    def fetch(self, offer: Offer) -> int | Refusal:
        return 0

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages + disk_pages
