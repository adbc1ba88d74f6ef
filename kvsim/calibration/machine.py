"""Measures a machine: peak rates, copies by fragment size, a disk by page size, and the parts of a step by size."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsim.calibration.disk_rates import DiskRates
from kvsim.calibration.link_rates import LinkRates
from kvsim.calibration.step_parts import StepParts
from kvsim.hardware.copy_rule import CopyRule
from kvsim.hardware.curves import ComputeCurves, DiskCurves
from kvsim.hardware.spec import HardwareSpec
from kvsim.kernels.gated_silu import gate_silu
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.model.recurrence import state_layer_bytes
from kvsim.substrate.hardware.model.transformer import PADDING, Transformer, check_model
from kvsim.substrate.hardware.stopwatch import Stopwatch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
IN_A_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes at which a machine is measured."""

    product: int = 8192
    """Rows, columns and inner size of the matrix product that measures the peak rate."""
    link_bytes: int = GIB
    """Size of each pool between which pages are copied."""
    fragments: tuple[int, ...] = tuple(KIB << k for k in range(0, 12, 2))
    list_bytes: int = 256 * MIB
    """Size of the page lists that compare copy methods."""
    programs: tuple[int, ...] = (2, 4, 8, 16)
    paces: tuple[float, ...] = (0.8, 0.85, 0.9, 0.95, 1.0)
    copies: tuple[int, ...] = (0, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    """Sizes of copies in bytes; each copies at least one page."""
    disk_bytes: int = 512 * MIB
    """Largest size of a list of pages on disk."""
    most_disk_pages: int = 4096
    """Most pages in such a list, which limits lists of small pages."""
    disk_pages: tuple[int, ...] = tuple(KIB << k for k in (4, 6, 8, 10, 12, 14))
    """Page sizes on disk; the model's own page size is measured as well."""
    depths: tuple[int, ...] = (1, 4, 16)
    kv_bytes: int = 32 * GIB
    """Size of the pool of pages that steps read; at most a quarter of the GPU's memory is used."""
    tile_tokens: int = PADDING
    """Interval of tokens at which steps with prefill are measured, up to ``tiled_tokens``: their times depend on how well tiles
    fill the multiprocessors."""
    tiled_tokens: int = 2048
    tokens: tuple[int, ...] = (1, 8, 32, *range(2304, 4097, 256), 5120, 6144, 8192)
    """Further step sizes."""
    chunks: tuple[int, ...] = (128, 1024, 8192)
    contexts: tuple[int, ...] = (128, 1024, 8192, 32768, 65536)
    tiled_contexts: tuple[int, ...] = (2048, 16384)
    """Contexts of chunks of the other sizes up to ``tiled_tokens``, which are also measured without a prefix."""
    chunk_tokens: int = 4096
    """Most tokens of several chunks whose attention is measured at once. Larger chunks are measured alone."""
    chunk_contexts: int = 65536
    """The same for the tokens of their contexts."""
    scans: tuple[int, ...] = (16, 64)
    """Further sizes of chunks whose recurrence is measured."""
    decode_tokens: tuple[int, ...] = (
        16, 256, 1024, 2048, 4096, 5120, 6144, 8192, 12288, 16384, 32768, 65536, 131072, 262144, 524288,
    )  # fmt: skip
    """Total context tokens of all decoding requests. On an H200, attention of Llama 3 8B takes half as long again once its parts
    no longer fit the multiprocessors in blocks of 64 tokens, a little above 4,096."""
    batches: tuple[int, ...] = (1, 16, 128)
    repeated: tuple[int, int] = (16, 16384)
    """Decoding requests that have their context in common, and its tokens."""
    repeats: int = 5
    heat_s: float = 1.25
    """Time for which products, and steps with prefill, run before they are timed. On an H200, steps with prefill take 1 to 2 %
    longer between half a second and a second after a rest than later."""
    decode_heat_s: float = 0.25
    """The same for attention and recurrences of decoding requests, which hardly depend on the GPU's clock."""

    def chunks_at_once(self, tokens: int, context: int) -> int:
        """Return how many chunks of this size to measure at once: one, or an even number, so that few sums of tokens occur."""
        count = min(self.chunk_tokens // tokens, self.chunk_contexts // context, max(self.batches))
        return max(1, count - count % 2)


INTERPRETED = Sizes(
    product=64,
    link_bytes=64 * KIB,
    fragments=(512, 1024),
    list_bytes=8 * KIB,
    programs=(1, 2),
    paces=(1.0,),
    copies=(0, 8 * KIB),
    disk_bytes=MIB,
    most_disk_pages=16,
    disk_pages=(16 * KIB, 64 * KIB),
    depths=(1, 2),
    kv_bytes=MIB,
    tile_tokens=1,
    tiled_tokens=2,
    tokens=(4,),
    chunks=(8,),
    contexts=(8, 32),
    tiled_contexts=(16,),
    chunk_tokens=8,
    chunk_contexts=64,
    scans=(4,),
    decode_tokens=(16, 64),
    batches=(1, 2),
    repeated=(2, 64),
    repeats=1,
    heat_s=0.0,
    decode_heat_s=0.0,
)
"""Sizes for Triton's interpreter."""


@dataclass(kw_only=True)
class Measured:
    """A measured machine, and findings that are only shown to the user."""

    hardware: HardwareSpec
    launch_s: float
    """Time from the launch of a small kernel until the host sees its end."""
    is_direct: bool
    """Whether the disk was measured without the system's page cache."""
    decode_spread: float
    """Largest ratio between the times of batches with the same total of context tokens."""


class Calibration:
    """Measures this machine's device and host, and the disk at ``folder``, with the work of ``model``.

    Each time is the median of several, from the call until the host sees the end of the last byte or product.
    """

    def __init__(
        self, model: ModelSpec, page_tokens: int, folder: Path, *, device: torch.device, seed: int, say: Callable[[str], None]
    ) -> None:
        self.model, self.page_tokens, self.folder = model, page_tokens, folder
        self.device, self.seed, self.say = device, seed, say
        self.is_gpu = device.type == "cuda"
        self.sizes = Sizes() if self.is_gpu else INTERPRETED
        self.watch = Stopwatch(device, self.sizes.repeats)
        self.steady = Stopwatch(device, self.sizes.repeats, self.sizes.heat_s)

    def run(self) -> Measured:
        """Measure everything. Raises ValueError for a model that the hardware cannot run, and OSError if the disk is full."""
        check_model(self.model, self.device)
        self.say("measuring matrix products and memory")
        peaks = self.peaks()
        self.say("measuring copies between GPU and host")
        with LinkRates(self.watch, layers=self.model.attention_layers, pool_bytes=self.sizes.link_bytes, seed=self.seed) as link:
            link_peaks = link.peaks()
            copy_rule = self.copy_rule(link, link_peaks)
            links = link.curves(self.sizes.fragments, self.sizes.copies)
        del link
        self.say("measuring the disk")
        disk, disk_latency_s, is_direct = self.disk()
        self.say("measuring steps")
        compute, overhead_s, spread = self.compute(peaks["flops_per_s"], peaks["memory_bytes_per_s"])
        fragment_bytes = self.model.page_bytes(self.page_tokens) / self.model.attention_layers
        hardware = HardwareSpec(
            **(peaks | link_peaks),
            host_latency_s=links.to_device(fragment_bytes)[1],
            disk_read_bytes_per_s=max(row[2] for row in disk.read),
            disk_write_bytes_per_s=max(row[2] for row in disk.write),
            disk_latency_s=disk_latency_s,
            step_overhead_s=overhead_s,
            link_curves=links,
            disk_curves=disk,
            compute_curves=compute,
            copy_rule=copy_rule,
        )
        return Measured(hardware=hardware, launch_s=self.launch_s(), is_direct=is_direct, decode_spread=spread)

    # Peaks

    def peaks(self) -> dict[str, Any]:
        """Return the rate of a large product of random matrices, the memory size, and the rate of a copy within memory.

        The copy counts bytes read and bytes written.
        """
        size = self.sizes.product
        dtype = torch.bfloat16 if self.is_gpu else torch.float32
        left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        product_s = self._each_s(lambda: torch.mm(left, right, out=out))
        source = torch.empty(self.sizes.link_bytes, dtype=torch.uint8, device=self.device).random_(0, 256)
        target = torch.empty_like(source)
        copy_s = self._each_s(lambda: target.copy_(source))
        memory_bytes = torch.cuda.mem_get_info(self.device)[1] if self.is_gpu else host_memory_bytes()
        return {
            "flops_per_s": 2 * size**3 / product_s,
            "memory_bytes": memory_bytes,
            "memory_bytes_per_s": 2 * len(source) / copy_s,
        }

    def _each_s(self, action: Callable[[], object]) -> float:
        """Return the seconds of one of several consecutive actions, so that launches do not count."""

        def several() -> None:
            for _ in range(IN_A_ROW):
                action()

        return self.steady.seconds(several) / IN_A_ROW

    def launch_s(self) -> float:
        """Return the time from the launch of a trivial kernel to its end."""
        both, out = torch.ones(1, 32, device=self.device), torch.empty(1, 16, device=self.device)
        return self.watch.seconds(lambda: gate_silu(both, out))

    def copy_rule(self, link: LinkRates, peaks: dict[str, float]) -> CopyRule:
        """Find the rule that chooses copy methods, by comparing them."""
        sizes = self.sizes
        return link.find_rule(
            sizes.fragments,
            list_bytes=sizes.list_bytes,
            programs=sizes.programs,
            paces=sizes.paces,
            both_bytes_per_s=peaks["both_directions_bytes_per_s"],
        )

    # Disk

    def disk(self) -> tuple[DiskCurves, float, bool]:
        """Return curves, the time to read the smallest page, and whether the page cache was bypassed."""
        sizes = self.sizes
        rates = DiskRates(self.folder, most_bytes=sizes.disk_bytes, most_pages=sizes.most_disk_pages, seed=self.seed)
        own_bytes = self.model.page_bytes(self.page_tokens)
        page_sizes = sorted({*sizes.disk_pages, min(own_bytes, sizes.disk_bytes)})
        cells = [(depth, page_bytes) for depth in sizes.depths for page_bytes in page_sizes]
        found = [(depth, page_bytes, rates.bytes_per_s(page_bytes, depth)) for depth, page_bytes in cells]
        read, write, both = ([[depth, page_bytes, rate[at]] for depth, page_bytes, rate in found] for at in range(3))
        curves = DiskCurves(read=read, write=write, both=both)
        return curves, rates.latency_s(sizes.disk_pages[0]), rates.is_direct

    # Steps

    def compute(self, flops_per_s: float, memory_bytes_per_s: float) -> tuple[ComputeCurves, float, float]:
        """Return curves, the overhead of a step, and the spread of batches with equal context. No part exceeds the peak rates."""
        gc.collect()
        sizes = self.sizes
        transformer = self._transformer()
        transformer.record_decodes(max(sizes.batches))
        steps = StepParts(
            self.steady,
            Stopwatch(self.device, sizes.repeats, sizes.decode_heat_s),
            transformer,
            flops_per_s=flops_per_s,
            memory_bytes_per_s=memory_bytes_per_s,
            seed=self.seed,
        )
        tiled = range(sizes.tile_tokens, sizes.tiled_tokens + 1, sizes.tile_tokens)
        linear = [steps.linear_row(tokens) for tokens in sorted({*sizes.tokens, *tiled})]
        prefill = [
            steps.prefill_row(tokens, context, sizes.chunks_at_once(tokens, context))
            for tokens in sorted({*sizes.chunks, *tiled})
            for context in (sizes.contexts if tokens in sizes.chunks else sorted({tokens, *sizes.tiled_contexts}))
            if context >= tokens
        ]
        decode, spread = steps.decode_rows(sizes.decode_tokens, sizes.batches)
        requests, context = sizes.repeated
        is_hybrid = self.model.is_hybrid
        scan = [steps.scan_row(tokens) for tokens in sorted({*sizes.scans, *sizes.chunks})] if is_hybrid else None
        state_update = [steps.state_row(batch) for batch in sizes.batches] if is_hybrid else None
        curves = ComputeCurves(
            linear=linear,
            prefill_attention=prefill,
            decode_attention=decode,
            repeated_context_share=steps.repeated_share(context, requests),
            scan=scan,
            state_update=state_update,
            prefill_tile_tokens=sizes.tile_tokens,
        )
        return curves, steps.overhead_s, spread

    def _transformer(self) -> Transformer:
        """Create a transformer over a pool much larger than the GPU's caches, filled with random bits."""
        model, page_bytes = self.model, self.model.page_bytes(self.page_tokens)
        kv_bytes = self.sizes.kv_bytes
        if self.is_gpu:
            torch.cuda.empty_cache()
            kv_bytes = min(kv_bytes, torch.cuda.mem_get_info(self.device)[1] // 4)
        shape = (model.attention_layers, max(kv_bytes // page_bytes, 1), page_bytes // model.attention_layers)
        kv = torch.empty(shape, dtype=torch.uint8, device=self.device).random_(0, 256)
        states = None
        if model.is_hybrid:
            slots = (model.recurrent_layers, max(self.sizes.batches) + 1, state_layer_bytes(model))
            states = torch.empty(slots, dtype=torch.uint8, device=self.device).random_(0, 256)
        return Transformer(model, kv, self.page_tokens, device=self.device, seed=self.seed, states=states)


def host_memory_bytes() -> int:
    """Return the host's memory size, which replaces the GPU's without a GPU."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
