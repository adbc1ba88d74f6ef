"""Keys of pages that only this recording can make: nobody without its salt can test whether a text was in it."""

import os
import secrets
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from kvsim.errors import UsageError

SALT_BYTES = 32
KEY_BYTES = 16


class Salt:
    """Makes keys of 16 bytes by keyed BLAKE2b (RFC 7693): of other keys, and of chains of block ids."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def random(cls) -> "Salt":
        """Return a salt that is in no file and ends with the process."""
        return cls(secrets.token_bytes(SALT_BYTES))

    @classmethod
    def of_file(cls, path: Path) -> "Salt":
        """Return the salt that a file has, which is made if it does not exist, for its owner only. Raises UsageError."""
        try:
            if not path.exists():
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(secrets.token_hex(SALT_BYTES) + "\n")
            secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
        except OSError as error:
            raise UsageError(f"shadow.salt_file: {path}: {error.strerror or error}") from None
        except ValueError:
            secret = b""
        if len(secret) != SALT_BYTES:
            raise UsageError(f"shadow.salt_file: {path} must have {2 * SALT_BYTES} hexadecimal digits: name one that kvsim made")
        return cls(secret)

    def key(self, content: bytes) -> bytes:
        """Return the key of a content."""
        return blake2b(content, key=self._secret, digest_size=KEY_BYTES).digest()

    def number(self, content: bytes) -> int:
        """Return a number of 63 bits for a content."""
        return int.from_bytes(blake2b(content, key=self._secret, digest_size=8, person=b"number").digest(), "big") >> 1

    def chain(self, blocks: Iterable[int], scope: str = "") -> list[bytes]:
        """Return a key for each block, of its id and the keys before it; ids in different scopes share none."""
        key, keys = self.key(scope.encode("utf-8", "surrogatepass")), []
        for block in blocks:
            key = self.key(key + block.to_bytes(block.bit_length() // 8 + 1, "big", signed=True))
            keys.append(key)
        return keys
