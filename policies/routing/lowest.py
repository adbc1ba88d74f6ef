"""The engine with the lowest value of all, found without a look at each of them."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvsim.policies.routing.base import EngineStatus

NONE: Final = -1


class Lowest:
    """A tournament of the engines that are offered: only matches of engines whose value may have changed are played again.

    A choice among n engines costs log2(n) matches for each change since the choice before. All are played again when others
    are offered, or if nobody says what has changed.
    """

    def __init__(self, changed: set[int] | None = None) -> None:
        """``changed`` collects the numbers of engines whose value may have changed; a choice empties it. None: any may have."""
        self._changed = changed
        self._offered: Sequence[EngineStatus] = ()
        self._places: dict[int, int] = {}
        """Where each of the offered engines stands."""
        self._values: list[Any] = []
        self._winners: list[int] = []
        """The winner of each match, as a place: of match i, those of matches 2 i and 2 i + 1; the second half are the places."""

    def of(self, engines: Sequence[EngineStatus], value_of: Callable[[EngineStatus], Any]) -> int:
        """Return the place, among ``engines``, of the one with the lowest value; of several, the first.

        The sequence is known by its identity: it must not change between calls.
        """
        changed = self._changed
        if changed is None or engines is not self._offered:
            self._begin(engines, value_of)
        else:
            places = self._places
            for number in changed:
                place = places.get(number, NONE)
                if place != NONE:
                    self._values[place] = value_of(engines[place])
                    self._play_again(place)
        if changed:
            changed.clear()
        return self._winners[1]

    def value(self, place: int) -> Any:
        """Return the value of an engine, as of the last choice."""
        return self._values[place]

    def _begin(self, engines: Sequence[EngineStatus], value_of: Callable[[EngineStatus], Any]) -> None:
        """Play all matches."""
        self._offered = engines
        self._places = {status.engine: place for place, status in enumerate(engines)} if self._changed is not None else {}
        self._values = [value_of(status) for status in engines]
        size = 1 << len(engines).bit_length()
        self._winners = [NONE] * size + [place if place < len(engines) else NONE for place in range(size)]
        for match in range(size - 1, 0, -1):
            self._winners[match] = self._winner(match)

    def _winner(self, match: int) -> int:
        first, second = self._winners[2 * match], self._winners[2 * match + 1]
        if second == NONE:
            return first
        return second if self._values[second] < self._values[first] else first

    def _play_again(self, place: int) -> None:
        """Play the matches of an engine again, from its first one on, until another one wins what it has won before."""
        winners, values = self._winners, self._values
        at, winner, value = len(winners) // 2 + place, place, values[place]
        while at > 1:
            other = winners[at ^ 1]
            if other != NONE:
                theirs = values[other]
                if not value < theirs if at & 1 else theirs < value:
                    winner, value = other, theirs
            at //= 2
            before = winners[at]
            winners[at] = winner
            if winner == before and winner != place:
                return
