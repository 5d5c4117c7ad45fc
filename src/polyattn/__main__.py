"""``python -m polyattn`` and the ``polyattn`` command."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        print(
            f'polyattn: error: the command line needs {needed}; install it with: pip install "polyattn[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    from .cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
