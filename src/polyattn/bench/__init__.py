"""The engine of ``polyattn bench`` and of the scripts in ``benchmarks/``.

:func:`compare` times polyattn on a backend against its peers, :func:`peak_memory`
measures the memory of one call. Nothing here is imported with polyattn.
"""

from ._case import TASKS, Case, Shape, parse_shape
from ._compare import compare
from ._memory import Memory, peak_memory
from ._peers import JITTED, PEERS
from ._picture import draw, writable
from ._race import race
from ._report import OURS, Report, Row
from ._threads import cores

__all__ = [
    "JITTED",
    "OURS",
    "PEERS",
    "TASKS",
    "Case",
    "Memory",
    "Report",
    "Row",
    "Shape",
    "compare",
    "cores",
    "draw",
    "parse_shape",
    "peak_memory",
    "race",
    "writable",
]
