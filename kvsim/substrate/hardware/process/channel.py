"""Messages between the engine's process and the process of a GPU."""

import pickle
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any


class Channel:
    """One end of a pair of connected sockets. Messages arrive whole and in order; any thread may send."""

    def __init__(self, socket: int) -> None:
        """Take charge of the socket with this file descriptor."""
        self._connection = Connection(socket)
        self._lock = Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(packed)

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError or OSError if the other end is closed."""
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
