"""How a kind of validation is presented: on a terminal, as tables and pictures, and in a line on what fails."""

from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console

from kvsim.report.figure import Picture
from kvsim.report.servers import page as server_page
from kvsim.report.summary import Table
from kvsim.report.validation import repeated_page, validation
from kvsim.results.result import RunRecord


class Presentation(NamedTuple):
    """What shows the ``validate.json`` of one kind."""

    print: Callable[[RunRecord, Console], None]
    failures: Callable[[RunRecord], str]
    """Says which figures are outside their tolerances; empty if all hold."""
    tables: Callable[[RunRecord], list[Table]]
    pictures: Callable[[RunRecord], list[Picture]]


ONCE = Presentation(validation.print_validation, validation.failures, validation.tables, validation.pictures_of)
"""Of one real run on this machine."""
REPEATED = Presentation(
    repeated_page.print_repeated, repeated_page.repeated_failures, repeated_page.tables, repeated_page.pictures_of
)
"""Of several."""
SERVER = Presentation(server_page.print_server, validation.failures, server_page.tables, server_page.pictures)
"""Of runs on a server."""
