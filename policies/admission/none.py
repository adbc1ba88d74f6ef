"""No admission control."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class NoAdmission(AdmissionPolicy):
    """Serves every request, however long it waits: what the others are compared with.

    any request   admitted
    """

    @property
    def is_asked(self) -> bool:
        return False

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        return True
