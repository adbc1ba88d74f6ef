"""What the field, and other tools, call what kvsim's settings and results have other names for."""

OTHER_WORDS = {
    "ssd": ("tiers.disk.capacity", "drive"),
    "nvme": ("tiers.disk.capacity", "drive"),
    "dram": ("tiers.cpu.capacity",),
    "ram": ("tiers.cpu.capacity",),
    "host_memory": ("tiers.cpu.capacity",),
    "hbm": ("tiers.gpu.capacity",),
    "vram": ("tiers.gpu.capacity",),
    "gpus": ("hardware.gpus", "cluster.engines"),
    "tp": ("hardware.gpus",),
    "tensor_parallel_size": ("hardware.gpus",),
    "replicas": ("cluster.engines",),
    "instances": ("cluster.engines",),
    "qps": ("trace.rate",),
    "rps": ("trace.rate",),
    "request_rate": ("trace.rate",),
    "block_size": ("page_tokens",),
    "page_size": ("page_tokens",),
    "max_num_seqs": ("engine.max_running_requests",),
    "batch_size": ("engine.max_running_requests", "engine.max_batch_tokens"),
    "max_num_batched_tokens": ("engine.max_batch_tokens",),
    "gpu_memory_utilization": ("tiers.gpu.gpu_memory_utilization",),
    "bandwidth": ("hardware.host_to_device_bytes_per_s", "hardware.disk_read_bytes_per_s"),
    "sla": ("slo",),
    "goodput": ("slo",),
    "latency": ("ttft_s", "tpot_s", "e2e_s"),
    "itl": ("tpot_s",),
    "tbt": ("tpot_s",),
    "reuse": ("hit_rate", "hit_tokens"),
    "cache_hit": ("hit_rate", "hit_tokens"),
    "router": ("routing",),
    "load_balancing": ("routing",),
    "scheduler": ("scheduling",),
    "offloading": ("placement", "tiers.cpu.capacity"),
    "write_policy": ("placement",),
    "replacement": ("eviction",),
    "prefetching": ("prefetch",),
}
"""By such a word, in lower case with underscores, what ``kvsim help`` describes in its place."""


def kvsims_words(word: str) -> tuple[str, ...]:
    """Return what kvsim calls something; nothing for a word that nobody else uses."""
    return OTHER_WORDS.get(word.lower().replace("-", "_").replace(" ", "_"), ())
