"""What Marconi's authors printed, and the traces that they published.

Pan et al., Marconi: Prefix Caching for the Era of Hybrid LLMs (MLSys 2025, arXiv:2411.19379v3), sections 5.2 to 5.4. Averages and
percentiles are over many settings of cache size and arrival rate, which the paper does not list; figures 7 and 8 are box plots.
"""

from typing import NamedTuple

from kvsim.report.reproduction import PublishedFile

ARTIFACT = "Marconi's artifact (github.com/ruipeterpan/marconi, artifact_evaluation.md), traces.tar.gz"
FILES = {
    name: PublishedFile(f"traces/{name}_*.jsonl", f"{ARTIFACT}: one of its {name} traces", "all: 0.7 GB packed, 6.3 GB")
    for name in ("lmsys", "sharegpt", "swebench")
}
COLUMNS = {
    "token_ids": "input_tokens",
    "output_length": "num_output_tokens",
    "output_token_ids": "output_tokens",
    "timestamp": "ts",
}
"""Fields of a line of these traces; ``ts`` is in seconds."""


class Printed(NamedTuple):
    """Token hit rates of a workload, as printed."""

    over_vllm: float
    """Marconi's over vLLM+'s, on average (figure 7)."""
    over_sglang: float
    """Percent more than SGLang+, at the 95th percentile (figure 8)."""


WORKLOADS = {"lmsys": Printed(4.5, 45.6), "sharegpt": Printed(7.3, 19.0), "swebench": Printed(34.4, 219.7)}
BY_GB = {60: 24.3, 80: 51.5, 100: 68.3, 120: 30.0, 140: 10.0}
"""Percent more hits than SGLang+ by cache size in GB, on a trace that the paper calls representative (figure 11)."""
BY_STATE_DIM = {16: 5.7, 128: 35.4}
"""Marconi's hit rate over vLLM+'s by the dimension of a state (figure 12b)."""
BY_RECURRENT_LAYERS = {2: (13.5, 5.8), 4: (66.6, 26.0), 8: (160.0, 59.7)}
"""Percent more hits than vLLM+ and SGLang+ by recurrent layers for each attention layer (figure 12a)."""
SHORT_TOKENS = 7_000
SHORT_POINTS, LONG_POINTS, MORE_FLOPS = -3.0, 25.5, 90.3
"""Against SGLang+: hit rate of shorter and of longer prompts, at most, and percent more FLOPs saved (section 5.3)."""
