"""What others may be told of a cache: every method does nothing here."""

from typing import Any

from kvsim.core.lease import Lease
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import PageWatch, Tier
from kvsim.core.transfer import Transfer


@mypyc_attr(allow_interpreted_subclasses=True)
class Watch(PageWatch):
    """Is told of what happens, once it has happened, and changes nothing. Override what is to be known.

    ``ServedCache.watch`` lets it know of requests, transfers and states; a tier's ``watches`` let it know of that tier's pages.
    """

    # --- requests ------------------------------------------------------------------------------------------------------------

    def matched(self, lease: Lease) -> None:
        """A request that might be admitted has been matched."""

    def admitted(self, lease: Lease, pages: int, load_pages: int) -> None:
        """A request has been admitted with room for ``pages`` pages, ``load_pages`` of them to be loaded from below."""

    def refused(self, lease: Lease) -> None:
        """There was no room for a request."""

    def claimed(self, lease: Lease) -> None:
        """A request has all slots that were reserved for it, at its admission or for its answer."""

    def released(self, lease: Lease, why: str) -> None:
        """A request has given back what it held: ``why`` is FINISHED, RETRACTED, HANDED_OVER or LOST."""

    def emptied(self, gpu: Tier | None) -> None:
        """Every page has been dropped, or what a GPU tier had whose engine has failed."""

    # --- transfers -----------------------------------------------------------------------------------------------------------

    def began(self, transfer: Transfer) -> None:
        """A transfer has its slots in the target."""

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended, perhaps without having begun."""

    # --- recurrent states on a GPU that change without a transfer ------------------------------------------------------------
    # ``page`` names a state, ``slots`` are those of the tier that has or had it. What is copied from or to them must be copied
    # before whatever uses the slots next.

    def saved(self, lease: Lease, page: int, slots: Any) -> None:
        """The state of a running request has been saved in these slots."""

    def detached(self, page: int, slots: Any) -> None:
        """A state has become detached: it leaves these slots and is kept outside the tiers."""

    def begins_detached(self, lease: Lease, page: int) -> None:
        """A request begins from a detached state. If it is about to be admitted, the state may leave to make room for it.

        If the request is not admitted after all, it gets a new lease the next time. Of several states, it begins from the last.
        """
