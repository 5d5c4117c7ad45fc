"""The process in which checks run: ``python -m polyattn.testing.functions._worker FUNCTION CHECK…``.

It writes one JSON line before and one after each check to its standard output, and what the function prints to
standard error. A crash of the function ends this process alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ._checks import run_one
from ._function import load_function
from ._subject import Subject


def main(name: str, checks: list[str]) -> None:
    """Run the checks in turn."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    function = load_function(name)
    say(name=function.name, version=function.version)
    for check in checks:
        say(start=check)
        say(row=run_one(check, Subject(function)))
    stream.flush()
    os._exit(0)  # the threads of some libraries abort the process at a normal exit


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
