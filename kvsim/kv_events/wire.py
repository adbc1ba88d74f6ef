"""What publishers and subscribers of KV events agree on: endpoints of ranks, sequence numbers, and where ZMQ comes from."""

from types import ModuleType

from kvsim.errors import UsageError

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence number after the last message of a replay."""
TRANSPORTS = ("tcp://", "ipc://", "inproc://")


def zmq_module() -> ModuleType:
    """Import ZMQ. Raises UsageError without it."""
    try:
        import zmq.asyncio
    except ImportError:
        raise UsageError("pyzmq is missing, which KV events are sent with: pip install kvsim[servers]") from None
    return zmq


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: its number is added to the port; inproc:// and ipc:// get ``_dp`` and it.

    Port 0 or ``*``, which lets the system choose, stays. Raises UsageError for what is no endpoint.
    """
    if not endpoint.startswith(TRANSPORTS):
        raise UsageError(f"an endpoint of KV events must begin with tcp://, ipc:// or inproc://, not {endpoint!r}")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, colon, port = endpoint.rpartition(":")
    if not colon or host == "tcp" or not (port == "*" or port.isdecimal() and int(port) + rank < 1 << 16):
        raise UsageError(f"an endpoint of KV events needs a port, as in tcp://127.0.0.1:5557, not {endpoint!r}")
    return endpoint if port in ("*", "0") else f"{host}:{int(port) + rank}"


def is_wildcard(endpoint: str) -> bool:
    """Whether an endpoint is for everyone who comes, so that one can only listen there."""
    return endpoint.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))
