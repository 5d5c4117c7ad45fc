"""A plan of attention over many devices: time of a step, where transfers hide, memory and efficiency, by formulas.

It knows three numbers of a machine: the floating-point operations that a device does in a second, and the bandwidth and
latency of its link. All devices send at the same time, each to one other device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ArgumentError

__all__ = ["Machine", "Plan", "Shape", "plan"]

WIDE = 4  # bytes of a number of sums and of the gradients that travel; 8 for float64
BACKWARD = 2.5  # five products for the two of the forward


class Shape(NamedTuple):
    """The axis lengths of a problem, the bytes of a number, and whether it is causal."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d_k: int
    d_v: int
    itemsize: int = 4
    causal: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward; half of the pairs are excluded if it is causal."""
        pairs = self.n_q * self.n_k
        if self.causal:  # the queries are the last positions
            first = max(self.n_k - self.n_q, 0)
            pairs = self.n_q * first + min(self.n_q, self.n_k) ** 2 // 2
        return 2.0 * self.batch * self.heads * pairs * (self.d_k + self.d_v)

    @property
    def wide(self) -> int:
        """Bytes of a number of sums."""
        return max(self.itemsize, WIDE)

    def queries(self, features: int) -> int:
        """Return the numbers in an array of the queries with so many features."""
        return self.batch * self.heads * self.n_q * features

    @property
    def keys(self) -> int:
        """The numbers in the keys and values."""
        return self.batch * self.kv_heads * self.n_k * (self.d_k + self.d_v)


class Machine(NamedTuple):
    """The devices: their number, FLOP/s of one, and bytes/s and seconds of latency of its link."""

    devices: int
    speed: float
    link: float
    latency: float


@dataclass(frozen=True)
class Pass:
    """The forward or the backward: how many steps, the seconds of computing and of transfer in each, and of all."""

    steps: int
    compute: float
    transfer: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The plan of one method."""

    method: str
    forward: Pass
    backward: Pass
    hidden: bool
    """Whether the transfers of the forward take no longer than the computation that they overlap."""
    hidden_from: float | None
    """The least n at which they are hidden, with as many queries as keys; None if they never overlap."""
    bytes: float
    """Memory of a device, for a forward and a backward."""
    efficiency: float
    """The time of perfect sharing divided by that of the plan."""
    refused: str | None = None
    """Why the method cannot be used."""

    @property
    def seconds(self) -> float:
        """Time of a forward and a backward."""
        return self.forward.seconds + self.backward.seconds

    def __str__(self) -> str:
        step = f"compute {short(self.forward.compute)}, transfer {short(self.forward.transfer)} a step"
        hides = "never hidden" if self.hidden_from is None else f"hidden from n = {self.hidden_from:.2g}"
        shown = f"{step}, {'hidden' if self.hidden else hides}; forward + backward {short(self.seconds)}"
        shown = f"{shown}, {self.bytes / 2**30:.3g} GiB a device, efficiency {self.efficiency:.0%}"
        return f"{self.method:<11}{shown}" + (f"; not possible: {self.refused}" if self.refused else "")


def plan(shape: Shape, machine: Machine) -> tuple[Plan, ...]:
    """Return the plans of ring, all-to-all and tree.

    Parameters
    ----------
    shape : Shape
        The whole problem.
    machine : Machine
        The devices and their links.

    Returns
    -------
    tuple of Plan
        *ring*: keys and values go round, each transfer overlaps the computation of a step, causal work is balanced by
        the zig-zag order. *all-to-all*: heads are exchanged for positions before and after one computation.
        *tree*: each device has all queries and its keys, and partial results are merged in pairs, then in pairs of
        these; for few queries, as in decoding.

    Raises
    ------
    ArgumentError
        If a number of the machine is not positive, or the latency is negative.

    Notes
    -----
    Ring, with c the computation of one of P² blocks and t the transfer of one shard of keys and values:
    P − 1 steps of max(c, t), and c for the last shard. The backward computes 2.5 c a step and moves the shard's
    gradients as well.

    Examples
    --------
    >>> from polyattn.distributed import Machine, Shape, plan
    >>> shape = Shape(1, 32, 8, 10**6, 10**6, 128, 128, itemsize=2, causal=True)
    >>> ring, *others = plan(shape, Machine(devices=64, speed=4e14, link=5e10, latency=5e-6))
    >>> ring.hidden, round(ring.efficiency, 3)
    (True, 0.998)
    """
    for name, value in machine._asdict().items():
        if not (value > 0 or (name == "latency" and value == 0)):
            raise ArgumentError(f"{name}: expected a positive number, got {value}")
    return tuple(_plans(shape, machine))


def _plans(shape: Shape, machine: Machine) -> Iterator[Plan]:
    yield _ring(shape, machine)
    yield _all_to_all(shape, machine)
    yield _tree(shape, machine)


def _sent(machine: Machine, size: float, messages: int = 1) -> float:
    """Return the seconds of some messages with so many bytes in all."""
    return messages * machine.latency + size / machine.link


def _ring(shape: Shape, machine: Machine) -> Plan:
    count, shard = machine.devices, shape.keys / machine.devices
    compute = shape.flops / count**2 / machine.speed
    transfer = _sent(machine, shard * shape.itemsize) if count > 1 else 0.0
    back = _sent(machine, shard * (shape.itemsize + shape.wide), 2) if count > 1 else 0.0
    forward = Pass(count, compute, transfer, (count - 1) * max(compute, transfer) + compute)
    last = _sent(machine, shard * shape.wide) if count > 1 else 0.0  # the gradients' way home overlaps nothing
    slope = BACKWARD * compute
    backward = Pass(count, slope, back, (count - 1) * max(slope, back) + slope + last)
    local = (2 * shape.queries(shape.d_v) + shape.queries(shape.d_k)) * shape.itemsize  # out, dout, q
    local += shape.queries(shape.d_k) * shape.wide  # dq
    travelling = 3 * shape.keys * (shape.itemsize + shape.wide)  # own, held, under way; of keys, and of gradients
    return _of("ring", shape, machine, forward, backward, (local + travelling) / count, _hidden_from(shape, machine))


def _hidden_from(shape: Shape, machine: Machine) -> float:
    """Return the n at which the computation of a step is as long as its transfer: a L² = latency + b L, L = n / P."""
    per_pair = shape.flops / max(shape.n_q * shape.n_k, 1) / machine.speed
    per_key = shape.keys / shape.n_k * shape.itemsize / machine.link
    root = math.sqrt(per_key**2 + 4 * per_pair * machine.latency)
    return machine.devices * (per_key + root) / (2 * per_pair)


def _all_to_all(shape: Shape, machine: Machine) -> Plan:
    count = machine.devices
    part, messages = (count - 1) / count**2, count - 1  # of all bytes, from each device
    inputs, out = shape.queries(shape.d_k) + shape.keys, shape.queries(shape.d_v)
    compute = shape.flops / count / machine.speed
    there = _sent(machine, part * (inputs + out) * shape.itemsize, 2 * messages)
    forward = Pass(1, compute, there, compute + there)
    backward = Pass(1, BACKWARD * compute, there, BACKWARD * compute + there)
    held = 2 * (inputs + out) * shape.itemsize + (inputs + out) * (shape.itemsize + shape.wide)
    reason = None
    if shape.heads % count or shape.kv_heads % count:
        reason = f"{count} devices do not divide {shape.heads} query heads and {shape.kv_heads} key heads"
    return _of("all-to-all", shape, machine, forward, backward, held / count, None, reason)


def _tree(shape: Shape, machine: Machine) -> Plan:
    count = machine.devices
    levels = math.ceil(math.log2(count)) if count > 1 else 0
    rows = shape.queries(shape.d_v + 2) * shape.wide  # a partial result, and two statistics of each row
    compute = shape.flops / count / machine.speed
    transfer = _sent(machine, rows) if levels else 0.0
    forward = Pass(1, compute, transfer, compute + levels * transfer)
    back = _sent(machine, shape.queries(shape.d_k) * shape.wide) if levels else 0.0  # dq
    backward = Pass(1, BACKWARD * compute, back, BACKWARD * compute + levels * (back + transfer))
    of_queries = (2 * shape.queries(shape.d_v) + shape.queries(shape.d_k)) * shape.itemsize + 2 * rows
    of_queries += shape.queries(shape.d_k) * shape.wide
    held = of_queries + shape.keys * (shape.itemsize + shape.wide) / count
    return _of("tree", shape, machine, forward, backward, held, None)


def _of(
    method: str, shape: Shape, machine: Machine, forward: Pass, backward: Pass, size: float,
    hidden_from: float | None, refused: str | None = None,
) -> Plan:  # fmt: skip
    perfect = (1 + BACKWARD) * shape.flops / machine.devices / machine.speed
    hidden = hidden_from is not None and forward.transfer <= forward.compute
    efficiency = perfect / (forward.seconds + backward.seconds)
    return Plan(method, forward, backward, hidden, hidden_from, size, efficiency, refused)


def short(seconds: float) -> str:
    """Return a time in the unit that fits it."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
