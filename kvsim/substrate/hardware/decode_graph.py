"""Steps as CUDA graphs: recorded once, then launched as one (NVIDIA: CUDA C++ programming guide, CUDA graphs)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvsim.kernels.paged_attention import ContextRoom


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A recorded step in which as many requests decode as ``room`` has. For fewer it takes as long."""

    room: ContextRoom
    """Which contexts the step attends to."""
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    kept: list[torch.Tensor]
    """What the step reads and writes, and what therefore must not be given back."""

    def replay(self, requests: int) -> torch.Tensor:
        """Enqueue the step on the current stream; returns the logits of the first requests."""
        self.graph.replay()
        return self.logits[:requests]


def recorded(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """What ``step`` enqueues, and its result, which every replay writes anew. No other thread may use the GPU meanwhile."""
    step()  # compiles and loads what it needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def graph_sizes(most: int) -> Iterator[int]:
    """Numbers of requests, up to ``most``, such that the next larger one is never far."""
    size = 1
    while size < most:
        yield size
        size += size if size < 8 else 1 << size.bit_length() - 2
    yield most
