"""Routing policies: what every one of them owes the router, and the simple ones by hand."""

import hydra
import pytest

from kvsim.commands.policies import policies
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.power_of_two import PowerOfTwo
from kvsim.policies.routing.random import RandomRouting
from kvsim.policies.routing.round_robin import RoundRobin
from kvsim.policies.routing.session_affinity import SessionAffinity
from tests.policies.small_routing import NAMES, SmallRouter, policy_of, prompt, router


def traffic(index: int) -> Request:
    """Requests of seven sessions, with prompts of four kinds, some of which begin alike."""
    kind = index % 4
    return prompt((100 * (kind // 2), 2), (1000 + 10 * kind, 3), index=index, session=index % 7)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_is_up_is_chosen(name: str) -> None:
    small = router(policy_of(name))
    running: list[tuple[Request, int]] = []
    for index in range(90):
        now = float(index)
        if index == 30:
            for lost in [one for one in running if one[1] == 1]:
                running.remove(lost)
                small.ended(*lost, now)
            small.down(1, now)
        if index == 60:
            small.up(1, now)
        request = traffic(index)
        chosen = small.send(request, now)
        assert chosen in (0, 1, 2) and (chosen != 1 or not 30 <= index < 60)
        running.append((request, chosen))
        if index % 3:
            small.first_token(*running[-1], now)
            small.ended(*running.pop(index % len(running)), now)
    assert sum(known.outstanding_requests for known in small.engines.values()) == len(running)


@pytest.mark.parametrize("name", NAMES)
def test_one_engine_gets_everything(name: str) -> None:
    small = router(policy_of(name), engines=1)
    assert {small.send(traffic(index), float(index)) for index in range(20)} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    routers = [router(policy_of(name), engines=5, seed=7) for _ in range(2)]
    choices = [[small.send(traffic(index), float(index)) for index in range(50)] for small in routers]
    assert choices[0] == choices[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_without_a_whole_page_is_routed(name: str) -> None:
    request = Request(index=0, arrival_s=0.0, prompt_tokens=2, output_tokens=1, runs=(), prompt_pages=0)
    small = router(policy_of(name))
    chosen = small.send(request, 0.0)
    small.first_token(request, chosen, 1.0)
    small.ended(request, chosen, 1.0)


# --- by hand -----------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    small = router(RoundRobin())
    assert [small.send(prompt(index=index), 0.0) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_leaves_out_an_engine_that_is_down() -> None:
    small = router(RoundRobin())
    assert [small.send(prompt(), 0.0) for _ in range(2)] == [0, 1]
    small.down(2, 1.0)
    assert [small.send(prompt(), 1.0) for _ in range(3)] == [0, 1, 0]
    small.up(2, 2.0)
    assert [small.send(prompt(), 2.0) for _ in range(3)] == [1, 2, 0]


def test_random_gives_every_engine_the_same_chance() -> None:
    small = router(RandomRouting())
    chosen = [small.send(prompt(), 0.0) for _ in range(3000)]
    assert all(900 < chosen.count(engine) < 1100 for engine in range(3))


@pytest.mark.parametrize(("load", "chosen"), [("tokens", [0, 1, 1, 1]), ("requests", [0, 1, 0, 1])])
def test_the_least_loaded_engine_of_all_is_chosen(load: str, chosen: list[int]) -> None:
    """Prompts of 41, 9, 9 and 5 tokens; nothing ends. By tokens, engine 1 has 18 of them when the last one comes."""
    small = router(LeastLoaded(load=load), engines=2)
    prompts = [prompt((0, 10)), prompt((20, 2)), prompt((30, 2)), prompt((40, 1))]
    assert [small.send(request, 0.0) for request in prompts] == chosen


def test_what_has_ended_is_no_load() -> None:
    small = router(LeastLoaded(), engines=2)
    first = prompt((0, 10))
    assert small.send(first, 0.0) == 0
    assert small.send(prompt((20, 2)), 0.0) == 1
    small.ended(first, 0, 1.0)
    assert small.send(prompt((30, 2)), 1.0) == 0


def test_of_two_engines_power_of_two_takes_the_less_loaded() -> None:
    small = router(PowerOfTwo(), engines=2)
    busy = small.send(prompt((0, 10)), 0.0)
    assert [small.send(prompt((20 + index, 1)), 0.0) for index in range(8)] == [1 - busy] * 8
    assert small.engines[1 - busy].outstanding_tokens == 8 * 5 < 41


def test_power_of_two_looks_at_two_different_engines() -> None:
    """The most loaded of four is never chosen; the least loaded is whenever it is drawn, which is half of the time."""
    small = router(PowerOfTwo(load="requests"), engines=4)
    for engine, known in small.engines.items():
        known._outstanding_requests = 1000 * engine
    chosen = []
    for _ in range(2000):
        chosen.append(small.send(prompt(), 0.0))
        small.ended(prompt(), chosen[-1], 0.0)
    assert chosen.count(3) == 0
    assert 900 < chosen.count(0) < 1100


def of_sessions(small: SmallRouter, sessions: int) -> list[int]:
    return [small.send(prompt(index=session, session=session), 0.0) for session in range(sessions)]


def test_a_session_stays_on_its_engine() -> None:
    small = router(SessionAffinity(), engines=4)
    first = of_sessions(small, 100)
    assert of_sessions(small, 100) == first
    small.down(2, 1.0)
    without = of_sessions(small, 100)
    assert all(now == before for now, before in zip(without, first, strict=True) if before != 2)
    assert {now for now, before in zip(without, first, strict=True) if before == 2} == {0, 1, 3}
    small.up(2, 2.0)
    assert of_sessions(small, 100) == first


def mixed(number: int) -> int:
    """MurmurHash3's final mix of the last 32 bits."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def test_the_engine_of_a_session_has_the_highest_hash_of_both() -> None:
    """Request 5 has no session: the complement of its number stands for one."""
    small = router(SessionAffinity(), engines=7)
    for up in (list(range(7)), [0, 1, 2, 4, 5, 6]):
        expected = [max(up, key=lambda engine: mixed(mixed(session) ^ mixed(engine + 1))) for session in range(200)]
        assert of_sessions(small, 200) == of_sessions(small, 200) == expected
        assert small.send(prompt(index=5), 0.0) == max(up, key=lambda engine: mixed(mixed(~5) ^ mixed(engine + 1)))
        small.down(3, 1.0) if 3 in up else None


def test_sessions_are_spread_evenly() -> None:
    chosen = of_sessions(router(SessionAffinity(), engines=5), 5000)
    assert all(900 < chosen.count(engine) < 1100 for engine in range(5))


def test_requests_without_a_session_are_spread_by_their_index() -> None:
    small = router(SessionAffinity(), engines=2)
    chosen = [small.send(prompt(index=index), 0.0) for index in range(1000)]
    assert 400 < sum(chosen) < 600
    assert chosen != of_sessions(small, 1000)


# --- settings ------------------------------------------------------------------------------------------------------------


def plan(*overrides: str, command: str = "simulate") -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        return build_run(hydra.compose("config", [*overrides]), command=command, overrides=overrides)


def problem(*overrides: str, command: str = "simulate") -> str:
    with pytest.raises(UsageError) as error:
        plan(*overrides, command=command)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (["routing=least_loaded", "routing.load=pages"], "routing.load must be one of tokens, requests, not pages"),
        (["routing=power_of_two", "routing.load="], "routing.load must be one of tokens, requests, not "),
        (["routing=kv_aware", "routing.staleness_s=-1"], "routing.staleness_s must be 0 or more, not -1.0"),
        (["routing=kv_aware", "routing.staleness_s=inf"], "routing.staleness_s must be a finite number of at least 0, not inf"),
        (
            ["routing=kv_aware", "routing.router_temperature=nan"],
            "routing.router_temperature must be a finite number of at least 0",
        ),
        (["routing=kv_aware", "routing.overlap_score_weight=-0.5"], "routing.overlap_score_weight must be 0 or more, not -0.5"),
        (["routing=prefix_aware", "routing.cache_threshold=1.5"], "routing.cache_threshold must be from 0 to 1, not 1.5"),
        (["routing=prefix_aware", "routing.balance_abs_threshold=-1"], "routing.balance_abs_threshold must be 0 or more, not -1"),
        (["routing=prefix_aware", "routing.balance_rel_threshold=0.9"], "routing.balance_rel_threshold must be at least 1, not"),
        (["routing=prefix_aware", "routing.max_tree_tokens=0"], "routing.max_tree_tokens must be at least 1, not 0"),
        (["routing=prefix_aware", "routing.fallback=random"], "routing.fallback must be one of least_loaded, smallest_tree, not"),
        (["routing=round_robin", "+routing.load=tokens"], "routing.load: there is no such setting; it has no settings"),
    ],
)
def test_bad_settings_end_with_their_key(override: list[str], expected: str) -> None:
    assert problem(*override).startswith(expected)


@pytest.mark.parametrize("command", ["replay", "curve"])
def test_routing_has_no_effect_without_a_clock(command: str) -> None:
    assert problem("routing=random", command=command) == f"routing has no effect on kvsim {command}: leave it out"


@pytest.mark.parametrize("choice", NAMES)
def test_every_yaml_composes_to_its_class_with_its_defaults(choice: str) -> None:
    built = plan(f"routing={choice}", "cluster.engines=2").routing
    fields = getattr(type(built), "__dataclass_fields__", {})
    assert {name: getattr(type(built)(), name) for name in fields} == {name: getattr(built, name) for name in fields}


def test_policies_are_listed_with_purpose_and_defaults() -> None:
    listed = {name: (purpose, settings) for name, purpose, settings in policies("routing")}
    assert sorted(listed) == NAMES
    assert listed["kv_aware"][1] == "overlap_score_weight=1.0\nrouter_temperature=0.0\nstaleness_s=0.0\nlate_answers=false"
    assert listed["least_loaded"][1] == "load=tokens"
    assert listed["random"][1] == ""
    assert all(purpose.endswith(".") for purpose, _ in listed.values())
