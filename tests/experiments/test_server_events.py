"""The study of a running vLLM's KV events: what is recorded in the repository."""

from pathlib import Path
from types import ModuleType

import pytest

from kvsim.kv_events.recorded import Message, read_recorded
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


def test_recorded_messages_are_read_and_what_is_wrong_with_them_is_counted(events: ModuleType) -> None:
    messages = list(read_recorded(EXPERIMENTS / "real_servers/events/conversations.gz"))
    read = events.read_messages(messages)
    assert (len(read.batches), read.refused, read.lost) == (1642, 0, 0)
    assert read.fields["AllBlocksCleared", "", ""] == 1
    assert read.fields["BlockStored", "medium", "`GPU`"] == read.fields["BlockStored", "block_hashes", "list of int"] > 0
    read = events.read_messages([*messages[:5], messages[6], Message(0.0, messages[6].sequence + 1, 0, b"", b"no event")])
    assert (len(read.batches), read.refused, read.lost) == (6, 1, 1)


def test_the_claims_fail_where_a_block_is_missed_or_a_message_is_lost(events: ModuleType) -> None:
    def found(share: Share, lost: int = 0) -> object:
        return events.Found(events.Read([], 0, lost, {}), {("client", 5.0): ScoreView({"gpu": share}, {"gpu": Share(10)})}, None)

    def verdicts(sessions: object, conversations: object) -> list[bool]:
        return [claim.holds for claim in events.claims({"sessions": sessions, "conversations": conversations})]

    good = found(Share(10))
    assert verdicts(good, good) == [True, True, True]
    assert verdicts(found(Share(9, 1)), good) == [True, False, True]
    assert verdicts(good, found(Share(10, 0, 1), lost=1)) == [False, True, False]
