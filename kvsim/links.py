"""Whether the folders that belong to the package from outside it are there."""

from pathlib import Path

from kvsim.errors import UsageError

PACKAGE = Path(__file__).resolve().parent
LINKED = ("policies", "kernels", "conf")
"""In a checkout, symbolic links to the folders of the same names beside the package."""


class BrokenCheckout(UsageError, ImportError):
    """A checkout without symbolic links."""


def check_links(package: Path = PACKAGE) -> None:
    """Raise BrokenCheckout if a link is an ordinary file, as git writes it where symbolic links are switched off (Windows)."""
    broken = [name for name in LINKED if not (package / name).is_dir()]
    if broken:
        raise BrokenCheckout(
            f"kvsim/{broken[0]} is not a symbolic link to the folder {broken[0]}: the checkout has no symbolic links; on "
            "Windows, switch on developer mode, then run `git config core.symlinks true` and `git checkout -- kvsim`"
        )
