"""``python -m kvsim``: the ``kvsim`` command, for where it is not on the path."""

import sys

from kvsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
