"""Keys say nothing without their salt, which is in one file at most."""

from pathlib import Path

import pytest

from kvsim.errors import UsageError
from kvsim.shadow.sources.salt import Salt


def test_keys_of_two_salts_have_nothing_in_common() -> None:
    assert Salt(b"a" * 32).key(b"page") != Salt(b"b" * 32).key(b"page")
    assert Salt.random().key(b"page") != Salt.random().key(b"page")
    assert Salt(b"a" * 32).key(b"page") == Salt(b"a" * 32).key(b"page")
    assert 0 <= Salt.random().number(b"page") < 2**63


def test_a_chain_says_what_came_before() -> None:
    salt = Salt(b"a" * 32)
    assert salt.chain([1, 2, 3])[:2] == salt.chain([1, 2, 4])[:2]
    assert salt.chain([1, 2])[1] != salt.chain([3, 2])[1]
    assert salt.chain([1], "a")[0] != salt.chain([1], "b")[0]
    assert len({salt.chain([block])[0] for block in (0, 1, -1, 255, 256, 2**64, 2**256)}) == 7


def test_a_file_keeps_a_salt_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    key = Salt.of_file(path).key(b"page")
    assert Salt.of_file(path).key(b"page") == key and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "zz", "00" * 31, "no salt at all"])
def test_a_file_that_has_no_salt_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "salt"
    path.write_text(content)
    with pytest.raises(UsageError, match="must have 64 hexadecimal digits: name one that kvsim made"):
        Salt.of_file(path)
    assert path.read_text() == content


def test_a_salt_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"shadow.salt_file: .*: No such file or directory"):
        Salt.of_file(tmp_path / "missing" / "salt")
