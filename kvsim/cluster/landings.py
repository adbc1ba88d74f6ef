"""Reads from the tiers below a GPU, as a book records them."""

from simpy import Environment

from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.book import Book


class Landings(Watch):
    """Has the reads from below that end recorded in a book."""

    def __init__(self, book: Book, env: Environment) -> None:
        self.book = book
        self.env = env

    def ended(self, transfer: Transfer) -> None:
        if transfer.done and not transfer.goes_down:
            self.book.read(transfer, self.env.now)
