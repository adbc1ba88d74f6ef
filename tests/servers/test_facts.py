"""What servers say of themselves, as far as they do."""

import asyncio

import pytest

from kvsim.calibration.server import measure
from kvsim.errors import UsageError
from kvsim.servers.dialects import sglang, vllm
from kvsim.servers.dialects.vllm import Vllm
from kvsim.servers.host_memory import SHARES
from kvsim.servers.http import Http
from kvsim.servers.play import get_to_know, read_facts
from kvsim.servers.results import sglang_bench
from kvsim.servers.settings import ServerSettings
from kvsim.servers.simulated import ENGINES
from tests.servers.stub import MODELS, answering

METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="101"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="101"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
"""


def test_engines_with_a_cache_each_are_counted() -> None:
    async def engines(url: str) -> tuple[int, int | None]:
        settings = ServerSettings(url=url)
        async with Http(url, 5.0) as http:
            _, known = await get_to_know(http, settings)
        return known.engines, known.facts.capacity_tokens

    with answering({"/v1/models": MODELS, "/metrics": METRICS, "/version": {"version": "0.25.1"}}) as url:
        assert asyncio.run(engines(url)) == (2, 1600), "the capacity is that of one engine"


def test_a_busy_server_may_not_have_emptied_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LOOK_S", 0.001)

    async def doubt(url: str) -> str:
        async with Http(url, 5.0) as http:
            return await Vllm().reset(http)

    with answering({"/metrics": METRICS, "/reset_prefix_cache": 200}) as url:
        assert "vLLM had 3 other requests" in asyncio.run(doubt(url))
    with answering({"/reset_prefix_cache": 200}) as url:
        assert asyncio.run(doubt(url)) == ""


def test_an_older_sglang_is_asked_by_the_older_name() -> None:
    models = {"data": [{"id": "m", "owned_by": "sglang"}]}
    info = {"page_size": 4, "max_total_num_tokens": 400, "version": "0.4", "internal_states": [{}]}
    with answering({"/v1/models": models, "/get_server_info": info}) as url:
        facts = read_facts(ServerSettings(url=url))
    assert (facts.engine, facts.page_tokens, facts.capacity_tokens, facts.version) == ("sglang", 4, 400, "0.4")
    assert "internal_states" not in facts.settings


@pytest.mark.parametrize("given", [None, 64])
def test_sglang_says_how_many_requests_it_runs_only_in_its_state(given: int | None) -> None:
    """As SGLang 0.5.15 and 0.5.23 answer: the flag is null if it was not set, and that of all engines if it was."""
    models = {"data": [{"id": "m", "owned_by": "sglang"}]}
    state = {"effective_max_running_requests_per_dp": 32}
    info = {"page_size": 1, "max_running_requests": given, "dp_size": 2, "internal_states": [state, state]}
    with answering({"/v1/models": models, "/server_info": info}) as url:
        assert read_facts(ServerSettings(url=url)).settings["max_running_requests"] == 32
    bench = sglang_bench.facts({"server_info": info})
    assert bench is not None and bench.settings["max_running_requests"] == 32
    for states in ([], [{}], None, [7]):
        bench = sglang_bench.facts({"server_info": info | {"internal_states": states}})
        assert bench is not None and bench.settings["max_running_requests"] == given


SECRETS = {"api_key": "s3cret", "hf_token": "s3cret", "admin_api_key": "s3cret", "download_dir": "/home/s3cret"}


def test_keys_addresses_and_paths_of_a_server_are_not_kept() -> None:
    nested = {
        "model_config": SECRETS | {"model": "/home/s3cret", "max_model_len": 100}, "parallel_config": {"master_addr": "s3cret"},
        "kv_transfer_config": {"kv_connector": "Own", "kv_ip": "s3cret", "kv_connector_extra_config": SECRETS},
        "instance_id": "s3cret",
    }  # fmt: skip
    metrics = METRICS.replace("num_gpu_blocks", 'kv_path="s3cret",num_gpu_blocks')
    with answering({"/v1/models": MODELS, "/metrics": metrics, "/server_info": {"vllm_config": nested}}) as url:
        found = read_facts(ServerSettings(url=url)).settings
    assert found == {
        "model_config.max_model_len": 100, "kv_transfer_config.kv_connector": "Own", "cache_config.block_size": "16",
        "cache_config.num_gpu_blocks": "101",
    }  # fmt: skip
    models = {"data": [{"id": "m", "owned_by": "sglang"}]}
    info = SECRETS | {"model_path": "/home/s3cret", "tp_size": 2, "host": "s3cret", "hicache_size": {"s3cret": 1}}
    with answering({"/v1/models": models, "/server_info": info}) as url:
        assert read_facts(ServerSettings(url=url)).settings == {"tp_size": 2}
    bench = sglang_bench.facts({"server_info": info})
    assert bench is not None and bench.settings == {"tp_size": 2} and bench.model == "s3cret"
    named = sglang_bench.facts({"server_info": {"model_path": "meta/llama"}})
    assert named is not None and named.model == "meta/llama", "the name of a model, not a path"


@pytest.mark.parametrize(("engine", "table"), [("vllm", vllm.SETTINGS), ("sglang", sglang.SETTINGS)])
def test_what_is_read_of_a_server_s_settings_is_kept(engine: str, table: frozenset[str]) -> None:
    played = ENGINES[engine]
    read = (
        {flag.name for flag in played.flags} | {one.name for one in played.missing} | {played.cache_flag[0], *played.host_flags}
    )
    of_host = {played.host_bytes.name, *SHARES} if played.host_bytes is not None else set()
    assert read | of_host <= table
    for names in (measure.STEP_TOKENS, measure.RUNNING, measure.LONGEST):
        assert table & set(names)
    assert measure.JOINS.get(engine, played.cache_flag[0]) in table


def test_pages_that_are_no_metrics_say_nothing() -> None:
    with answering({"/v1/models": MODELS, "/metrics": "<html>welcome</html>", "/version": "0.1"}) as url:
        facts = read_facts(ServerSettings(url=url))
    assert (facts.engine, facts.version, facts.page_tokens, facts.capacity_tokens) == ("vllm", None, None, None)


@pytest.mark.parametrize("models", [{}, {"data": None}, {"data": [1, {"owner": "vllm"}]}, "text"])
def test_a_server_that_lists_no_models_needs_their_name(models: object) -> None:
    with answering({"/v1/models": models}) as url:
        with pytest.raises(UsageError, match="does not list its models: set model"):
            read_facts(ServerSettings(url=url))
        assert read_facts(ServerSettings(url=url, model="mine")).model == "mine"


def test_a_server_that_wants_a_key_says_so_and_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering({"/v1/models": 401}) as url, pytest.raises(UsageError, match=r"wants a key \(HTTP 401\): set KVSIM_API_KEY"):
        read_facts(ServerSettings(url=url))
    monkeypatch.setenv("KVSIM_API_KEY", "secret")
    assert Http("http://127.0.0.1:1", 5.0)._client.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["schlüssel", "two words", "secret\n"])
def test_a_key_that_is_none_is_refused_without_telling_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIM_API_KEY", key)
    with pytest.raises(UsageError, match=r"^KVSIM_API_KEY is no key: it has [a-zA-Z ,]*$") as raised:
        read_facts(ServerSettings(url="http://127.0.0.1:1"))
    assert key.strip() not in str(raised.value)
