"""The process of one GPU: carries out what the engine's process asks for.

Started as ``python -m kvsim.substrate.hardware.process.gpu_process SOCKET`` with one end of a pair of sockets. Messages to it
are (call number or None, method, arguments); those from it are the method of ``Answers`` and its arguments, or ``answered``, the
call number, the result and the error.
"""

import os
import pickle
import signal
import sys
from traceback import format_exc
from typing import TYPE_CHECKING, Any

from kvsim.substrate.hardware.device import find_device
from kvsim.substrate.hardware.process.channel import Channel
from kvsim.substrate.hardware.wall_clock import SWITCH_INTERVAL_S

if TYPE_CHECKING:
    from kvsim.substrate.hardware.orders import GpuDemand, PoolAddress


class ChannelAnswers:
    """Passes answers on to the engine's process. Ends this process if that one has ended."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def ended(self, number: int, value: int, start_s: float, end_s: float) -> None:
        self.tell("ended", number, value, start_s, end_s)

    def failed(self, error: BaseException) -> None:
        self.tell("failed", portable(error))

    def lost(self) -> None:
        """Do nothing: the engine's process finds out by itself."""

    def tell(self, *message: Any) -> None:
        """Send a message."""
        try:
            self.channel.send(message)
        except OSError:
            os._exit(1)


class GpuProcess:
    """Opens a GPU and calls its methods as the messages say, until it is closed or the engine's process has ended."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.answers = ChannelAnswers(channel)
        self.gpu: Any = None

    def serve(self) -> None:
        """Serve all messages. Only ``report``, ``close`` and what precedes the run keep later messages waiting."""
        while True:
            try:
                call, method, arguments = self.channel.receive()
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to wait for threads
            result, error = None, None
            try:
                result = self.open(*arguments) if method == "open" else getattr(self.gpu, method)(*arguments)
            except BaseException as raised:
                error = portable(raised)
            if call is not None:
                self.answers.tell("answered", call, result, error)
            elif error is not None:
                self.answers.failed(error)
            if method == "close":
                return

    def open(self, demand: "GpuDemand", processes: int) -> "PoolAddress":
        """Open the GPU for one of ``processes`` processes and return where the others find its pool."""
        device = find_device(demand.number)  # before Triton is imported
        import torch

        from kvsim.substrate.hardware.local_gpu import LocalGpu
        from kvsim.substrate.hardware.memory.host_pool import HostPool

        if device.type == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        host = HostPool(demand.cpu_pages, demand.page_bytes * demand.ranks, demand.host_file) if demand.cpu_pages else None
        host_states = None
        if demand.cpu_states:
            host_states = HostPool(
                demand.cpu_states, demand.model.state_bytes, demand.host_states_file, setting="tiers.cpu.states"
            )  # fmt: skip
        gpu = self.gpu = LocalGpu(demand, host, self.answers, device, host_states)
        return gpu.address


def portable(error: BaseException) -> BaseException:
    """Return an error that the other process can unpickle, with the place where it was raised."""
    error.add_note(format_exc())
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main(socket: int) -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The engine's process decides when this one ends.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    GpuProcess(Channel(socket)).serve()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
