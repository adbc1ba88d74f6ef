"""The text of a settings file that describes a machine, and tables of what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.construct import construct
from kvsim.report.terminal import print_table

COMMENTS = {
    "flops_per_s": "Rate of products of large random matrices, bf16 on a GPU.",
    "memory_bytes": "Memory of the GPU.",
    "memory_bytes_per_s": "Rate of a copy within GPU memory, counting bytes read and bytes written.",
    "gpus": "GPUs that serve one model together, tensor-parallel. One was measured.",
    "tensor_parallel": "GPUs that share each layer; null: gpus / pipeline_parallel.",
    "pipeline_parallel": "Stages of a pipeline, each with a part of the layers. One was measured.",
    "expert_parallel": "Groups of the GPUs that share a layer, each with routed experts of its own; 1: all have a part of each.",
    "expert_exchange": "allreduce: GPUs with experts of their own add up their results; all2all: tokens are sent there and back.",
    "expert_imbalance": "Tokens that the busiest group's experts get, relative to the mean.",
    "attention_data_parallel": "Whether each GPU has the KV of requests of its own.",
    "host_to_device_bytes_per_s": "Rate of one long copy from pinned host memory to the GPU.",
    "device_to_host_bytes_per_s": "Rate of one long copy from the GPU to pinned host memory.",
    "both_directions_bytes_per_s": "Total rate while both directions are busy.",
    "host_latency_s": "Time from the request of a copy to its first byte, for the fragments of the model's pages.",
    "copy_overhead_s": "Further latency of a copy between GPU and host while the serving engine launches steps.",
    "disk_read_bytes_per_s": "Rate of reading pages: the fastest of disk_curves.",
    "disk_write_bytes_per_s": "Rate of writing pages: the fastest of disk_curves.",
    "disk_latency_s": "Time to read one small page on an idle disk.",
    "flops_efficiency": "1: flops_per_s is measured.",
    "memory_efficiency": "1: memory_bytes_per_s is measured.",
    "step_overhead_s": "Time that a decode step of the serving engine takes beyond the sum of its parts.",
    "leap_overhead_s": "Further time of decode steps in a row, once, before the engine decides anew.",
    "copy_leap_s": "Further time of decode steps in a row, once, if copies from or to the GPU begin with them.",
    "prefill_overhead_s": "Further overhead of a step with prefill, on top of that of a decode step.",
    "prefill_launch_s": "Time the host needs to launch a step with one chunk of a prompt; a step with prefill never takes less.",
    "chunk_launch_s": "Further time to launch each further chunk.",
    "decode_launch_s": "Further time to launch the requests that decode beside prefill.",
    "copy_launch_s": "Further time to launch a step with prefill if copies from or to the GPU begin with it.",
    "request_overhead_s": "Time of a request in a server around the engine. There was none.",
    "request_token_s": "The same for each token of its prompt. There was none.",
    "rank_jitter": "Spread of the tensor-parallel ranks' speeds: for every transfer, each rank moves its part of the pages at\n"
    "# its rate times a factor drawn evenly from 1 - rank_jitter to 1. The slowest rank decides when a transfer ends and what\n"
    "# a cancelled one has brought. Not measured.",
    "rank_faults": "Ranks that are slow on a link, or fail to read or write pages of the disk:\n"
    "# [{rank: 3, link: disk-cpu, speed: 0.5, share: 0.01}] halves the speed and lets 1% of the pages fail. A page counts only\n"
    "# if every rank has it.",
    "interconnect_bytes_per_s": "Rate at which a GPU sends, and receives, pages between engines. Not measured.",
    "interconnect_latency_s": "Time from the request of such a copy to its first byte. Not measured.",
    "allreduce_bytes_per_s": "Rate of each GPU in all-reduces of tensor-parallel GPUs; null: they take no time. Not measured.",
    "allreduce_peer_bytes_per_s": "Most between two GPUs, where each pair has a link of its own; null: no limit. Not measured.",
    "allreduce_latency_s": "Time of each step of an all-reduce beyond its bytes. Not measured.",
    "allreduce_steps": "Steps of an all-reduce; null: 2 x (gpus - 1), a ring. Not measured.",
    "all2all_bytes_per_s": "Rate of each GPU that sends tokens to experts; null: as in an all-reduce. Not measured.",
    "all2all_latency_s": "Time of each way beyond its bytes; null: that of a step of an all-reduce. Not measured.",
    "all2all_dispatch_bytes": "Bytes of an element on the way to experts: 2 for bf16, 1 for FP8.",
    "host_memory_bytes_per_s": "Limit on the total rate of the host links of all engines of one host; null: none. Not measured.",
    "cluster_disk_read_bytes_per_s": "Rate of reads from a disk that all hosts share; null: as from a host's own. Not measured.",
    "cluster_disk_write_bytes_per_s": "The same for writes. Not measured.",
    "link_curves": "Rows of [fragment_bytes, latency_s, bytes_per_s]; for both_directions [fragment_bytes, bytes_per_s].",
    "disk_curves": "Rows of [depth, page_bytes, bytes_per_s]; both: total rate of concurrent reads and writes.\n"
    "# depth: concurrent requests, the number of disk threads.",
    "compute_curves": "Rows: linear [flops_per_byte, flops_per_s]; prefill_attention [query_rows, context_tokens, flops_per_s];\n"
    "# decode_attention [bytes read per layer, bytes_per_s]. Recurrences of hybrid models: scan [tokens of a chunk, state\n"
    "# elements times tokens per second]; state_update [bytes of states read and written per layer, bytes_per_s] of decoding\n"
    "# requests; null if not measured. Context that several decoding requests have in common takes only repeated_context_share\n"
    "# of its time after the first of them, or of what repeated_context_bytes hold of all of it in a layer (null: all).\n"
    "# A step with prefill takes as long as one with the next multiple of\n"
    "# prefill_tile_tokens; a rested GPU needs only rested_prefill_share of that time. warming_s: time constant of becoming\n"
    "# busy or rested. pads_chunks: attention of each chunk takes as long as for the queries of the step's longest chunk.",
    "copy_rule": "Rule by which substrate=hardware copies pages of each size: by kernel, staged, or by memcpy.",
    "noise": "How far durations of equal work are apart, from repeated steps, launches, copies, reads and writes. run: standard\n"
    "# deviation of the logarithm of a factor that a whole run shares. correlation: from one duration to the next. each: rows\n"
    "# of [probability, factor], quantiles of a duration's own factor. seed: tells runs apart. noise: null simulates without.",
}
"""What each setting is, as measured on this machine."""


def yaml_value(value: Any) -> str:
    """Return a setting's value as YAML."""
    if value is None:
        return "null"
    return str(value) if isinstance(value, (list, str)) else number(value)


def written(hardware: HardwareSpec, first_lines: str, comments: Mapping[str, str]) -> str:
    """Return the text of the file, with a comment for each setting."""
    lines = [first_lines, "_target_: kvsim.hardware.HardwareSpec"]
    for field in fields(HardwareSpec):
        if "tier" in field.metadata:  # a setting of that tier, not of the machine
            continue
        value = getattr(hardware, field.name)
        lines += ["", f"# {comments[field.name]}"]
        lines += setting_lines(field.name, value, "")
    return "\n".join(lines) + "\n"


def setting_lines(name: str, value: Any, indent: str) -> list[str]:
    """Return the lines of a setting; rows of numbers and parts of a group have lines of their own."""
    if is_dataclass(value):
        parts = [setting_lines(part.name, getattr(value, part.name), f"{indent}  ") for part in fields(value)]
        return [f"{indent}{name}:", *chain.from_iterable(parts)]
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [f"{indent}{name}:", *(f"{indent}  - [{', '.join(number(x) for x in row)}]" for row in value)]
    return [f"{indent}{name}: {yaml_value(value)}"]


def number(value: float) -> str:
    """Format a number with four digits so that every YAML parser reads it as a number; integers stay unchanged."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.3e}" if value >= 1e3 or 0 < value < 1e-2 else f"{value:.4g}" + ("" if value % 1 else ".0")


def check_text(text: str) -> None:
    """Raise UsageError if the text is not valid for ``hardware=``."""
    construct(HardwareSpec, OmegaConf.to_container(OmegaConf.create(text)), "hardware")


def show(console: Console, title: str, columns: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    left = [place for place, column in enumerate(columns) if not column]
    print_table(console, columns, rows, console.width, words=left, left=left, title=title)


def micro(value: float) -> str:
    return f"{value * 1e6:.4g}"
