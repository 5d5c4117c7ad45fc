"""The engine of ``polyattn bench`` and of the scripts in ``benchmarks/``. Nothing here is imported with polyattn."""

from ._case import TASKS, Case, Shape, parse_shape
from ._compare import Report, Row, compare
from ._memory import Memory, peak_memory
from ._peers import JITTED, OURS, PEERS
from ._picture import draw, writable
from ._race import race
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
