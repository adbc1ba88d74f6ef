"""How to start a configuration on vLLM or SGLang, alone or with LMCache: one row per server, one entry per flag.

Read in vLLM 0.33.0 (``config/cache.py``, ``engine/arg_utils.py``), SGLang 0.5.23 (``arg_groups``, ``mem_cache/pool_host``) and
LMCache 0.5.6 (``v1/config.py``, "Configuring LMCache"). Sizes differ in what they are of: ``--kv-offloading-size`` is in GiB for
all GPUs of an engine, ``--hicache-size`` in whole GB (1e9 bytes) for each of them, and LMCache's sizes are in GiB for each one's
worker.

Where GPUs have copies of KV, each keeps its own in host memory, but for latents (MLA), which all GPUs of a stage have. Without
stages and recurrent layers, vLLM keeps them once (``replicated_layout`` in ``offloading/config.py``), and LMCache can, on its
first rank (``save_only_first_rank`` in ``v1/cache_engine.py``). SGLang's host pool is of each rank.

A drive has the copies that are written to it: LMCache's local disk is of each worker that stores. SGLang's ranks have files of
their own (``config_suffix`` of ``HiCacheFile`` in ``mem_cache/hicache_storage.py``), but latents one file for all, which one rank
writes (``is_storage_writer``), in each stage. Simulated drives have each page once, so a note says what copies change there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsim.results.rates import size
from kvsim.sweeps.engine_setup import Setup

GIB = 2**30
MODEL = "MODEL"
"""Stands for the name or the folder of the model."""
LMCACHE_FILE, FOLDER = "lmcache.yaml", "/mnt/kv"


Value = Callable[[Setup], Any]
"""What a flag is set to: None leaves it out, and True is a flag without a value."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """How a configuration is started on one server."""

    name: str
    engine: str
    """The engine whose rules a simulation may have had, besides kvsim's own."""
    command: str
    flags: Mapping[str, Value]
    policies: Mapping[str, Mapping[str, str]]
    """By group, or group and tier: kvsim's names of the policies that the server has, and its own names for them."""
    tiers: tuple[str, ...]
    """Tiers that it has, each directly below the one before."""
    environment: Mapping[str, Value]
    files: Mapping[str, Callable[[Setup], str]]
    shared_tiers: tuple[str, ...] = ()
    """Tiers that engines on one host share."""
    is_for_lower_tiers: bool = False
    host_copies: Callable[[Setup], int] = lambda setup: setup.kv_copies
    """Copies of KV in the host memory of an engine."""
    notes: tuple[Callable[[Setup], str], ...] = ()


def _per_gpu(n_bytes: int, setup: Setup, unit: int) -> float:
    part, of = setup.per_gpu(n_bytes)
    return part / of / unit


def _kv_per_gpu(setup: Setup) -> int | None:
    if not setup.kv_bytes:
        return None
    part, of = setup.per_gpu(setup.kv_bytes)
    return part // of


def _above_one(value: int) -> int | None:
    return value if value > 1 else None


def _number(value: float) -> str:
    """Write a size with at most two decimals, never more than there is."""
    return f"{int(value * 100 + 1e-6) / 100:g}"


def _of_tier(n_bytes: Callable[[Setup], int], value: Value) -> Value:
    return lambda setup: value(setup) if n_bytes(setup) else None


def _cpu(setup: Setup) -> int:
    return setup.cpu_bytes


def _disk(setup: Setup) -> int:
    return setup.disk_bytes


def _offloading_gib(setup: Setup) -> str:
    return _number(setup.cpu_bytes * setup.copies_of_shared / GIB)


def _policy(server: Mapping[str, Mapping[str, str]], key: str) -> Value:
    return lambda setup: server[key].get(setup.choice(key))


def _of_shared(setup: Setup) -> int:
    return setup.copies_of_shared


def _in_files(setup: Setup) -> int:
    """SGLang's ranks have files of their own, but for latents, which one of them writes."""
    return 1 if setup.plan.model.is_latent else setup.kv_copies


def lmcache(setup: Setup) -> str:
    """Return LMCache's file of settings. Sizes are of all workers that store: the first one alone, or each."""
    is_first = setup.copies_of_shared < setup.kv_copies
    whose = "for the first GPU's worker, which alone stores latents" if is_first else "for each GPU's worker"

    def gib(n_bytes: int) -> str:
        return f"{_number(n_bytes / GIB if is_first else _per_gpu(n_bytes, setup, GIB))}  # GiB, {whose}"

    lines = [
        "chunk_size: 256",
        f"local_cpu: {str(bool(setup.cpu_bytes)).lower()}",
        f"max_local_cpu_size: {gib(setup.cpu_bytes)}",
        f"cache_policy: {OF_LMCACHE['eviction@tiers.cpu.eviction'].get(setup.choice('eviction@tiers.cpu.eviction'), 'LRU')}",
    ]
    if setup.disk_bytes:
        lines += [f"local_disk: file://{FOLDER}", f"max_local_disk_size: {gib(setup.disk_bytes // setup.copies_of_shared)}"]
    if setup.plan.model.is_latent and setup.tensor_parallel > 1:
        lines += ["extra_config:", f"  save_only_first_rank: {str(is_first).lower()}"]
    return "\n".join(lines)


OF_TIERS = {"placement": "cpu", "prefetch": "disk"}
"""Groups that are of no matter without a tier."""
OF_VLLM = {"scheduling": {"fcfs": "fcfs", "priority": "priority"}, "eviction": {"lru": "lru"}}
STORES_ALL = {"write_through": "", "store_threshold": ""}
OF_VLLM_OFFLOADING = OF_VLLM | {
    "eviction@tiers.cpu.eviction": {"lru": "lru", "arc": "arc"},
    "placement": STORES_ALL,
}
OF_SGLANG = {
    "scheduling": {"fcfs": "fcfs", "longest_prefix": "lpm", "dfs_weight": "dfs-weight"},
    "eviction": {name: name for name in ("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")},
}
OF_HICACHE = OF_SGLANG | {
    "placement": {name: name for name in ("write_through", "write_through_selective", "write_back")},
    "eviction@tiers.cpu.eviction": {"lru": "lru"},
    "prefetch": {"adaptive": ""},
}
OF_LMCACHE = {
    "placement": STORES_ALL,
    "eviction@tiers.cpu.eviction": {name: name.upper() for name in ("lru", "lfu", "fifo", "mru")},
}

VLLM_FLAGS: dict[str, Value] = {
    "--tensor-parallel-size": lambda setup: setup.tensor_parallel,
    "--pipeline-parallel-size": lambda setup: _above_one(setup.pipeline_parallel),
    "--enable-expert-parallel": lambda setup: True if setup.expert_parallel > 1 else None,
    "--gpu-memory-utilization": lambda setup: setup.plan.gpu_memory and f"{setup.plan.gpu_memory.gpu_memory_utilization:g}",
    "--kv-cache-memory-bytes": _kv_per_gpu,
    "--block-size": lambda setup: setup.plan.page_tokens,
    "--max-num-batched-tokens": lambda setup: setup.plan.engine.max_batch_tokens,
    "--max-num-seqs": lambda setup: setup.plan.engine.max_running_requests,
    "--scheduling-policy": _policy(OF_VLLM, "scheduling"),
    "--enable-prefix-caching": lambda setup: True,
}
SGLANG_FLAGS: dict[str, Value] = {
    "--tp-size": lambda setup: setup.tensor_parallel,
    "--pp-size": lambda setup: _above_one(setup.pipeline_parallel),
    "--ep-size": lambda setup: _above_one(setup.expert_parallel),
    "--enable-dp-attention": lambda setup: True if setup.has_own_requests else None,
    "--dp-size": lambda setup: setup.tensor_parallel if setup.has_own_requests else None,
    "--moe-a2a-backend": lambda setup: "deepep" if setup.plan.hardware.exchanges_tokens else None,
    "--mem-fraction-static": lambda setup: setup.static_fraction and f"{setup.static_fraction:.3f}",
    "--max-total-tokens": lambda setup: setup.kv_bytes and (setup.plan.tiers[0].capacity_pages or 0) * setup.plan.page_tokens,
    "--page-size": lambda setup: setup.plan.page_tokens,
    "--chunked-prefill-size": lambda setup: setup.plan.engine.max_batch_tokens,
    "--max-running-requests": lambda setup: setup.plan.engine.max_running_requests,
    "--schedule-policy": _policy(OF_SGLANG, "scheduling"),
    "--radix-eviction-policy": _policy(OF_SGLANG, "eviction"),
}
HICACHE_FLAGS: dict[str, Value] = {
    "--enable-hierarchical-cache": _of_tier(_cpu, lambda setup: True),
    "--hicache-size": _of_tier(_cpu, lambda setup: int(_per_gpu(setup.cpu_bytes, setup, 10**9)) or None),
    "--hicache-write-policy": _of_tier(_cpu, _policy(OF_HICACHE, "placement")),
    "--hicache-storage-backend": _of_tier(_disk, lambda setup: "file"),
    "--hicache-storage-prefetch-policy": _of_tier(_disk, lambda setup: setup.plan.config["prefetch"].get("stop")),
}
CONNECTOR = """'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'"""


def _small_host_pool(setup: Setup) -> str:
    """SGLang asserts that a host pool has more tokens than the pool of the GPU."""
    capacity = setup.plan.tiers[0].capacity_pages or 0
    pool = capacity * setup.plan.page_bytes
    if not setup.cpu_bytes or setup.cpu_bytes > pool:
        return ""
    return f"SGLang refuses a host pool that is no larger than the pool on the GPUs: {size(setup.cpu_bytes)} to {size(pool)}"


def _own_groups(setup: Setup) -> str:
    """vLLM spreads experts over all GPUs that share a layer, and sends tokens to them only from several data-parallel ranks."""
    hardware, groups = setup.plan.hardware, setup.expert_parallel
    if hardware.exchanges_tokens:
        return "vLLM sends tokens to their experts only with --data-parallel-size above 1; here its GPUs add up as with allreduce"
    if 1 < groups < setup.tensor_parallel:
        return f"vLLM spreads experts over all {setup.tensor_parallel} GPUs; the simulation had {groups} groups of experts"
    return ""


def _shared_attention(setup: Setup) -> str:
    """vLLM has data-parallel attention between data-parallel ranks, each of which is an engine."""
    if not setup.has_own_requests:
        return ""
    return f"vLLM has attention_data_parallel as --data-parallel-size={setup.tensor_parallel}, with one GPU for each rank"


def _micro_batches(setup: Setup) -> str:
    """SGLang divides the requests that may run among its micro-batches; the simulation fills one batch before the next."""
    stages = setup.pipeline_parallel
    return f"SGLang has at most 1/{stages} of --max-running-requests in each of {stages} micro-batches" if stages > 1 else ""


def _unlimited_storage(setup: Setup) -> str:
    return "the storage in files is not limited to the size of the drive by these flags" if setup.disk_bytes else ""


def _other_than_lru(setup: Setup) -> str:
    """vLLM's default for its CPU tier is LRU; it has no flag of its own for others."""
    name = OF_VLLM_OFFLOADING["eviction@tiers.cpu.eviction"].get(setup.choice("eviction@tiers.cpu.eviction"), "lru")
    if not setup.cpu_bytes or name == "lru":
        return ""
    return f"eviction@tiers.cpu.eviction={name} is eviction_policy of kv_connector_extra_config in --kv-transfer-config"


def _small_part(setup: Setup) -> str:
    """SGLang takes whole GB, and without ``--hicache-size`` twice the pool on the GPU."""
    if not setup.cpu_bytes or _per_gpu(setup.cpu_bytes, setup, 10**9) >= 1:
        return ""
    return "--hicache-size is in whole GB for each GPU, and this configuration has less: without it, SGLang takes another size"


def _threshold(setup: Setup) -> str:
    node = setup.plan.config["placement"]
    if not setup.cpu_bytes or setup.choice("placement") != "store_threshold" or node.get("k", 0) < 2:
        return ""
    return f"placement.k={node['k']} is store_threshold of kv_connector_extra_config in --kv-transfer-config"


def _copies_on_drive(copies: Callable[[Setup], int]) -> Callable[[Setup], str]:
    def note(setup: Setup) -> str:
        if not setup.disk_bytes or copies(setup) == 1:
            return ""
        n, part, simulated = copies(setup), size(setup.disk_bytes // copies(setup)), size(setup.disk_bytes)
        return (
            f"GPUs write {n} copies of the KV to the drive and read them all: it holds {part} of KV, at 1/{n} of its rates; the "
            f"simulation had {simulated} at full rates, so what the drive brings is too good"
        )

    return note


def _chunks(setup: Setup) -> str:
    return f"LMCache stores chunks of 256 tokens; the simulation had pages of {setup.plan.page_tokens}"


SERVERS = (
    Server(
        name="vLLM", engine="vLLM", command=f"vllm serve {MODEL}", policies=OF_VLLM_OFFLOADING, tiers=("gpu", "cpu"),
        flags=VLLM_FLAGS | {"--kv-offloading-size": _of_tier(_cpu, _offloading_gib)},
        environment={}, files={}, host_copies=_of_shared, notes=(_threshold, _other_than_lru, _own_groups, _shared_attention),
    ),
    Server(
        name="vLLM with LMCache", engine="vLLM", command=f"vllm serve {MODEL}", policies=OF_VLLM | OF_LMCACHE,
        tiers=("gpu", "cpu", "disk"), flags=VLLM_FLAGS | {"--kv-transfer-config": lambda setup: CONNECTOR},
        environment={"LMCACHE_CONFIG_FILE": lambda setup: LMCACHE_FILE}, files={LMCACHE_FILE: lmcache}, is_for_lower_tiers=True,
        host_copies=_of_shared, notes=(_chunks, _copies_on_drive(_of_shared), _own_groups, _shared_attention),
    ),
    Server(
        name="SGLang", engine="SGLang", command=f"python -m sglang.launch_server --model-path {MODEL}", policies=OF_HICACHE,
        tiers=("gpu", "cpu", "disk"), flags=SGLANG_FLAGS | HICACHE_FLAGS,
        environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": _of_tier(_disk, lambda setup: FOLDER)}, files={},
        shared_tiers=("disk",), notes=(
            _small_host_pool, _small_part, _unlimited_storage, _copies_on_drive(_in_files), _micro_batches,
        ),
    ),
    Server(
        name="SGLang with LMCache", engine="SGLang", command=f"python -m sglang.launch_server --model-path {MODEL}",
        policies=OF_SGLANG | OF_LMCACHE, tiers=("gpu", "cpu", "disk"),
        flags=SGLANG_FLAGS | {"--enable-lmcache": lambda setup: True},
        environment={"LMCACHE_CONFIG_FILE": lambda setup: LMCACHE_FILE}, files={LMCACHE_FILE: lmcache}, is_for_lower_tiers=True,
        host_copies=_of_shared, notes=(_chunks, _copies_on_drive(_of_shared), _micro_batches),
    ),
)  # fmt: skip


def starts(setup: Setup) -> list[dict[str, Any]]:
    """Return how to start an engine of a configuration on each server that has its tiers: name, command, files, notes."""
    tiers = {tier.name for tier in setup.plan.tiers}
    return [
        {
            "server": server.name,
            "command": _command(server, setup),
            "files": {name: text(setup) for name, text in server.files.items()},
            "notes": [
                *_lacking(server, setup, tiers),
                *_shared(server, setup),
                *_other_memory(server, setup),
                *filter(None, (note(setup) for note in server.notes)),
            ],
        }
        for server in _fitting(setup)
    ]


def host_copies(setup: Setup) -> int:
    """Return how many copies of KV an engine's host memory has on the first server that ``starts`` names; without one, that of
    each GPU."""
    return next((server.host_copies(setup) for server in _fitting(setup)), setup.kv_copies)


def _fitting(setup: Setup) -> list[Server]:
    """Return the servers that have the tiers and the engine of a configuration."""
    tiers = {tier.name for tier in setup.plan.tiers}
    own = setup.plan.rules.engine
    return [
        server
        for server in SERVERS
        if own in ("", server.engine)
        and tiers <= set(server.tiers)
        and not _misplaced(server, setup)
        and (len(tiers) > 1 or not server.is_for_lower_tiers)
    ]


def _other_memory(server: Server, setup: Setup) -> list[str]:
    """Say how much host memory a server needs if it is not as much as the price has."""
    copies, priced = server.host_copies(setup), host_copies(setup)
    if not setup.cpu_bytes or copies == priced:
        return []
    needed, paid = size(setup.cpu_bytes * copies), size(setup.cpu_bytes * priced)
    return [f"{server.name} needs {needed} of CPU memory for each engine ({copies} x the KV), and the price has {paid}"]


def without_server(setup: Setup) -> list[str]:
    """Say which tiers stand where no server has them."""
    misplaced = {name for server in SERVERS for name in _misplaced(server, setup)}
    return [
        f"no server is named: none has the {tier.name} tier directly below the {tier.above} tier"
        for tier in setup.plan.tiers
        if tier.name in misplaced
    ]


def _misplaced(server: Server, setup: Setup) -> list[str]:
    """Return the tiers of the simulation that are below another tier than on the server."""
    above = dict(zip(server.tiers[1:], server.tiers, strict=False))
    return [tier.name for tier in setup.plan.tiers if tier.name in above and tier.above != above[tier.name]]


def _command(server: Server, setup: Setup) -> str:
    before = [f"{name}={value}" for name, given in server.environment.items() if (value := given(setup)) is not None]
    words = []
    for flag, given in server.flags.items():
        value = given(setup)
        if value is not None:
            words.append(flag if value is True else f"{flag} {value}")
    return " \\\n    ".join([" ".join([*before, server.command]), *words])


def _shared(server: Server, setup: Setup) -> list[str]:
    """Say what engines of a host share in the simulation, and not on the server."""
    layout = setup.plan.layout
    if len(set(layout.hosts)) == layout.engines:
        return []
    names = [tier.name for tier in setup.plan.tiers[1:] if tier.scope != "engine" and tier.name not in server.shared_tiers]
    return [f"engines of a host shared the {name} tier in the simulation; here each has its part" for name in names]


def _lacking(server: Server, setup: Setup, tiers: set[str]) -> list[str]:
    """Say which policies of the simulation the server does not have."""
    found = []
    follows_calls = setup.plan.prefetch.follows_calls
    if follows_calls:
        found.append(f"prefetch={setup.choice('prefetch')} moves pages during tool calls, which {server.name} does not")
    for key, names in server.policies.items():
        group, _, place = key.partition("@tiers.")
        if follows_calls and group == "prefetch":
            continue
        tier = place.partition(".")[0] or OF_TIERS.get(group, "gpu")
        if tier in tiers and setup.choice(key) not in names:
            found.append(f"{key}={setup.choice(key)} is not among what {server.name} has ({', '.join(names)})")
    return found
