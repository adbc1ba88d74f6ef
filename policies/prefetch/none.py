"""No prefetch."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy, Refusal


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class NoPrefetch(PrefetchPolicy):
    """Fetches nothing ahead: a request loads whatever it can reuse from CPU and disk once it is admitted.

    while waiting   nothing
    at admission    everything that is stored, from disk through the CPU tier
    """

    def fetch(self, offer: Offer) -> int | Refusal:
        return 0

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages + disk_pages
