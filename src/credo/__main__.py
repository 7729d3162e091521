"""``python -m credo`` is ``credo``."""

from __future__ import annotations

import sys

from credo.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
