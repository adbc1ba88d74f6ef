"""The graph of tiers as one GPU tier sees it."""

from kvsim.core.tier import Edge, Tier


class View:
    """The graph of tiers as one GPU tier sees it."""

    def __init__(self, gpu: Tier) -> None:
        self.gpu = gpu
        self.edges: list[Edge] = list(gpu.below)
        """From the top down."""
        for edge in self.edges:
            self.edges += [below for below in edge.lower.below if below not in self.edges]
        self.sources: list[tuple[Tier, Tier | None]] = [(edge.lower, None) for edge in gpu.below]
        """(tier, the tier between it and the GPU), in order of preference; None if the tier is directly below the GPU."""
        for edge in gpu.below:
            self.sources += [(below.lower, edge.lower) for below in edge.lower.below]
        self.lower: list[Tier] = list(dict.fromkeys([tier for tier, _ in self.sources]))
        between = [tier for _, tier in self.sources if tier is not None]
        self.fetches_to: Tier | None = between[0] if between else None
        """The tier that prefetch reads into; None if there is none."""
