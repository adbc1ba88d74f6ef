"""Records steps as CUDA graphs, each launched as a whole (NVIDIA: CUDA C++ programming guide, CUDA graphs)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvsim.kernels.paged_attention import ContextRoom


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A recorded step for as many decoding requests as ``room`` holds. It takes as long for fewer."""

    room: ContextRoom
    """The contexts that the step attends to."""
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    kept: list[torch.Tensor]
    """Tensors that the step reads and writes, kept alive because they must not be freed."""
    sequences: torch.Tensor | None = None
    """The sequences whose recurrent states the step advances."""

    def replay(self, requests: int) -> torch.Tensor:
        """Enqueue the step on the current stream, and return the logits of the first ``requests`` requests."""
        self.graph.replay()
        return self.logits[:requests]


def recorded(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Record ``step`` as a graph, and return it with its result, which every replay overwrites.

    No other thread may use the GPU meanwhile.
    """
    step()  # compiles and loads its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def graph_sizes(most: int) -> Iterator[int]:
    """Yield numbers of requests up to ``most``, spaced so that the next larger one is never much larger."""
    size = 1
    while size < most:
        yield size
        size += size if size < 8 else 1 << size.bit_length() - 2
    yield most
