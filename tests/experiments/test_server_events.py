"""The study of a running vLLM's KV events: what is recorded in the repository, and blocks that are stored again, by hand."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvsim.kv_events.recorded import Message, read_recorded
from kvsim.replaying.observed import Moments
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.recorded_score import Streams
from kvsim.shadow.score import STORED, Happened
from kvsim.shadow.snapshot import ScoreView, Share
from tests.experiments.test_studies import EXPERIMENTS, study


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return study("real_servers", monkeypatch, script="events")


def test_every_block_of_a_running_vllm_is_predicted(events: ModuleType, tmp_path: Path) -> None:
    """All of its sessions, as recorded: 202 requests, which takes some seconds."""
    sessions = events.workloads(tmp_path / "no conversations")[1]
    found = events.find(sessions.name, sessions.settings)
    assert (len(found.read.batches), found.read.refused, found.read.lost) == (1067, 0, 0)
    assert found.scores["client", 1.0] == ScoreView({"gpu": Share(32_922)}, {"gpu": Share(20_924)})
    assert found.scores["events", 120.0].stored["gpu"].share == pytest.approx(0.9493, abs=1e-4)
    assert (found.again, found.others) == ([], 0)


def test_recorded_messages_are_read_and_what_is_wrong_with_them_is_counted(events: ModuleType) -> None:
    messages = list(read_recorded(EXPERIMENTS / "real_servers/events/conversations.gz"))
    read = events.read_messages(messages)
    assert (len(read.batches), read.refused, read.lost) == (1642, 0, 0)
    assert read.fields["AllBlocksCleared", "", ""] == 1
    assert read.fields["BlockStored", "medium", "`GPU`"] == read.fields["BlockStored", "block_hashes", "list of int"] > 0
    read = events.read_messages([*messages[:5], messages[6], Message(0.0, messages[6].sequence + 1, 0, b"", b"no event")])
    assert (len(read.batches), read.refused, read.lost) == (6, 1, 1)


def happened(*times_s: float, key: bytes = b"b") -> list[Happened]:
    return [Happened(at_s, STORED, "gpu", key) for at_s in times_s]


def test_a_block_that_a_request_under_way_stores_again_is_found(events: ModuleType) -> None:
    """The server stores b at 0 and again at 12, while the second request, which has it, pauses for 2 s; x is nobody's."""
    requests = [LiveRequest(0.0, (b"b",), 20, (), 3), LiveRequest(10.0, (b"b", b"c"), 40, (), 4)]
    tokens_s = [np.array([5.0, 6.0, 7.0]), np.array([15.0, 15.5, 17.5, 18.0])]
    moments = Moments(admitted_s=np.array([4.0, 14.0]), tokens_s=tokens_s)
    streams = Streams(requests, [*happened(0.0), *happened(12.0), *happened(12.0, key=b"x")], happened(0.1))
    assert events.stored_again(streams, moments, 5.0) == ([events.Again(request=1, blocks=1, steps=1, pause=4.0)], 1)
    streams = Streams(requests, happened(0.0, 12.0), happened(0.1, 7.5))
    assert events.stored_again(streams, moments, 5.0) == ([], 0)


def test_a_block_that_had_left_before_its_request_came_is_not_stored_again(events: ModuleType) -> None:
    """The second request comes at 10. What it stores at 11 had been there at 1, long before; at 11.5 it stores that again."""
    requests = [LiveRequest(0.0, (b"a",), 20, (), 2), LiveRequest(10.0, (b"b",), 20, (), 2)]
    moments = Moments(admitted_s=np.array([0.0, 10.0]), tokens_s=[np.array([1.0, 2.0]), np.array([12.0, 13.0])])
    before = happened(0.0, key=b"a")
    assert events.stored_again(Streams(requests, before + happened(1.0, 11.0), before + happened(1.0)), moments, 5.0) == ([], 1)
    streams = Streams(requests, before + happened(1.0, 11.0, 11.5), before + happened(1.0, 11.0))
    assert events.stored_again(streams, moments, 5.0) == ([events.Again(request=1, blocks=1, steps=1, pause=0.0)], 0)


def test_the_claims_fail_where_a_block_is_missed_or_a_message_is_lost(events: ModuleType) -> None:
    def found(share: Share, again: int = 0, others: int = 0, lost: int = 0) -> object:
        scores = {("client", 5.0): ScoreView({"gpu": share}, {"gpu": Share(10)})}
        repeats = [events.Again(0, again, 1, 3.0)] if again else []
        return events.Found(events.Read([], 0, lost, {}), scores, repeats, others, None)

    def verdicts(sessions: object, conversations: object) -> list[bool]:
        return [claim.holds for claim in events.claims({"sessions": sessions, "conversations": conversations})]

    good = found(Share(10)), found(Share(10, 100), again=100)
    assert verdicts(*good) == [True, True, True]
    assert verdicts(found(Share(9, 1)), good[1]) == [True, False, True]
    assert verdicts(found(Share(10, 0, 1)), good[1]) == [True, False, True]
    assert verdicts(good[0], found(Share(10, 100), again=89, others=11)) == [True, True, False]
    assert verdicts(good[0], found(Share(10, 100, 1), again=100, lost=1)) == [False, True, False]
