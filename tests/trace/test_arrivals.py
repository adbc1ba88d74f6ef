"""Files without timestamps get arrivals that are drawn: sessions as a Poisson process, pauses before later turns."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.randomness import depends_on_seed
from kvsim.settings.configuration import compose_with_choices
from kvsim.trace.base import Trace
from kvsim.trace.tokens import Tokens

LINES = [{"session_id": number // 2, "token_ids": [number // 2, 1, 2, 3], "output_length": 2} for number in range(800)]


def written(folder: Path, lines: list[dict[str, object]]) -> str:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def loaded(folder: Path, **settings: float) -> Trace:
    return Tokens(path=written(folder, LINES), sessions_per_s=2.0, **settings).load(4)  # type: ignore[arg-type]


def starts(trace: Trace) -> np.ndarray:
    return np.array([request.arrival_s for request in trace.requests if request.turn == 0])


def test_sessions_begin_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    gaps = np.diff(starts(loaded(tmp_path)), prepend=0.0)
    assert len(gaps) == 400 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.5, rel=0.15) and gaps.std() == pytest.approx(0.5, rel=0.2)


def test_a_later_turn_waits_for_the_answer_and_a_pause(tmp_path: Path) -> None:
    requests = loaded(tmp_path, pause_s=10.0).requests
    later = [request for request in requests if request.turn == 1]
    assert all(requests[request.after].session == request.session for request in later)
    assert np.mean([request.delay_s for request in later]) == pytest.approx(10.0, rel=0.15)


def test_rate_divides_starts_and_not_pauses(tmp_path: Path) -> None:
    once, twice = loaded(tmp_path, pause_s=10.0), loaded(tmp_path, pause_s=10.0, rate=2.0)
    assert starts(twice) == pytest.approx(starts(once) / 2)
    pauses = [sorted(request.delay_s for request in trace.requests) for trace in (once, twice)]
    assert pauses[0] == pauses[1]


def test_the_seed_decides_the_times_and_nothing_else(tmp_path: Path) -> None:
    one, same, other = (loaded(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert (starts(one) == starts(same)).all() and (starts(one) != starts(other)).any()
    assert {request.runs for request in one.requests} == {request.runs for request in other.requests}


def test_times_of_a_file_are_not_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, [{"timestamp": 5, "token_ids": [1, 2, 3, 4], "output_length": 1}])
    with pytest.raises(UsageError, match=r"log.jsonl:1: sessions_per_s has no effect on a file with timestamps"):
        Tokens(path=path, sessions_per_s=1.0).load(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sessions_per_s": 0.0}, "sessions_per_s must be above 0, not 0.0; null lets"),
        ({"sessions_per_s": float("nan")}, "sessions_per_s must be a finite number above 0, not nan"),
        ({"pause_s": 1.0}, "pause_s has no effect without sessions_per_s"),
        ({"sessions_per_s": 1.0, "pause_s": float("nan")}, "pause_s must be a finite number of at least 0, not nan"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens(path="-", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "depends"), [((), False), (("trace.sessions_per_s=1",), True)])
def test_seeds_have_an_effect_where_times_are_drawn(tmp_path: Path, settings: tuple[str, ...], depends: bool) -> None:
    plans = []
    for seed in (0, 1):
        overrides = [f"trace.path={written(tmp_path, LINES)}", *settings, f"seed={seed}", f"output={tmp_path}/out"]
        config, choices = compose_with_choices(overrides)
        plans.append(build_run(config, command="simulate", overrides=overrides, choices=choices))
    assert depends_on_seed(*plans) is depends
