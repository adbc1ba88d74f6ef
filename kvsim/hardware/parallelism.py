"""How the GPUs of an engine share a model, and what that makes them exchange."""

from math import inf

from kvsim.numbers import Real, Whole, check_settings

ALLREDUCE, ALL2ALL = EXCHANGES = "allreduce", "all2all"
"""How GPUs with experts of their own exchange activations. allreduce: each has all tokens, computes what its experts add to them,
and the sum over the GPUs is the layer's result. all2all: each has a part of the tokens, sends them to their experts' GPUs, and
gets the results back."""
DEGREES = ("pipeline_parallel", "expert_parallel")


class Parallelism:
    """What follows from the numbers of a ``HardwareSpec`` that say how its GPUs share a model.

    gpus = tensor_parallel x pipeline_parallel. A stage of the pipeline has some of the layers, and ``stage_gpus`` GPUs share
    each of them. The experts of a layer are spread over ``expert_parallel`` groups of these GPUs.
    """

    gpus: int
    tensor_parallel: int | None
    pipeline_parallel: int
    expert_parallel: int
    expert_exchange: str
    expert_imbalance: float
    attention_data_parallel: bool
    interconnect_bytes_per_s: float
    interconnect_latency_s: float
    allreduce_bytes_per_s: float | None
    allreduce_peer_bytes_per_s: float | None
    allreduce_latency_s: float
    allreduce_steps: int | None
    all2all_bytes_per_s: float | None
    all2all_latency_s: float | None

    @property
    def stage_gpus(self) -> int:
        """GPUs that share each layer: the degree of tensor parallelism."""
        return self.gpus // self.pipeline_parallel

    @property
    def attention_gpus(self) -> int:
        """GPUs that share the attention of a request: those of tensor parallelism, or one."""
        return 1 if self.attention_data_parallel else self.stage_gpus

    @property
    def communicates(self) -> bool:
        """Whether steps wait for the GPUs of a stage to add up their parts."""
        return self.stage_gpus > 1 and self.allreduce_bytes_per_s is not None

    @property
    def exchanges_tokens(self) -> bool:
        """Whether tokens are sent to the GPUs that have their experts, and back."""
        return self.expert_parallel > 1 and self.expert_exchange == ALL2ALL

    def allreduce_s(self, n_bytes: float) -> float:
        """Seconds in which the GPUs of a stage add up ``n_bytes`` of each, so that all have the sum; 0 without a rate, or on one.

        Each of ``g`` GPUs sends and receives ``2 * (g - 1) / g`` of the bytes, which is the least possible: as parts to be added
        (reduce-scatter), then as sums (all-gather). Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for
        clusters of workstations, Journal of Parallel and Distributed Computing 69(2), 2009. A ring does it in ``2 * (g - 1)``
        steps; over a switch, both halves can be one step each. Steps cost a latency and bytes a rate (Thakur, Rabenseifner and
        Gropp, Optimization of collective communication operations in MPICH, 2005); additions are not counted.
        """
        gpus = self.stage_gpus
        if gpus == 1 or self.allreduce_bytes_per_s is None:
            return 0.0
        steps = 2 * (gpus - 1) if self.allreduce_steps is None else self.allreduce_steps
        links_bytes_per_s = (gpus - 1) * (self.allreduce_peer_bytes_per_s or inf)
        n_bytes *= 2 * (gpus - 1) / gpus
        return steps * self.allreduce_latency_s + n_bytes / min(self.allreduce_bytes_per_s, links_bytes_per_s)

    def all2all_s(self, n_bytes: float) -> float:
        """Seconds in which each of ``expert_parallel`` GPUs sends ``n_bytes``, evenly to all including itself.

        All but the share that stays leaves in one step, a latency and a rate: those of all-to-alls or, without them, of
        all-reduces. 0 without either rate. Source: GShard (arXiv:2006.16668), section 3.3.
        """
        others = self.expert_parallel - 1
        rate = self.all2all_bytes_per_s
        if rate is None:
            if self.allreduce_bytes_per_s is None:
                return 0.0
            rate = min(self.allreduce_bytes_per_s, others * (self.allreduce_peer_bytes_per_s or inf))
        latency_s = self.allreduce_latency_s if self.all2all_latency_s is None else self.all2all_latency_s
        return latency_s + n_bytes * others / self.expert_parallel / rate

    def stage_send_s(self, n_bytes: float) -> float:
        """Seconds in which ``n_bytes`` of activations reach the next stage.

        All GPUs of a stage have them. Each sends its part to one GPU of the next stage, over the interconnect; there the parts
        are gathered, the second half of an all-reduce (Narayanan et al., arXiv:2104.04473, section 4.1).
        """
        part_s = n_bytes / self.stage_gpus / self.interconnect_bytes_per_s
        return self.interconnect_latency_s + part_s + self.allreduce_s(n_bytes) / 2

    def _check_parallel(self) -> None:
        """Raise ValueError for numbers of GPUs that do not fit together."""
        check_settings(self, Whole(1), *DEGREES)
        check_settings(self, Whole(1), "tensor_parallel", or_null=True)
        check_settings(self, Real(least=1), "expert_imbalance")
        if self.expert_exchange not in EXCHANGES:
            raise ValueError(f"expert_exchange must be one of {', '.join(EXCHANGES)}, not {self.expert_exchange}")
        stages, tensor = self.pipeline_parallel, self.tensor_parallel
        if tensor is not None and tensor * stages != self.gpus:
            product = f"tensor_parallel={tensor} x pipeline_parallel={stages}"
            raise ValueError(f"gpus is {self.gpus}, but {product} is {tensor * stages}: set gpus={tensor * stages}")
        if self.gpus % stages:
            raise ValueError(
                f"pipeline_parallel={stages} does not divide gpus={self.gpus}: gpus is its multiple, all stages' GPUs"
            )
        if self.stage_gpus % self.expert_parallel:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not divide the {self.stage_gpus} tensor-parallel GPUs that share a "
                "layer: experts are spread over these"
            )
        if self.exchanges_tokens and self.expert_parallel != self.stage_gpus:
            raise ValueError(
                f"expert_exchange={ALL2ALL} needs expert_parallel={self.stage_gpus}, all GPUs that share a layer, not "
                f"{self.expert_parallel}"
            )
