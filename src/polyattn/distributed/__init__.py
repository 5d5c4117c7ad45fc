"""Exact attention over several processes or machines, on the engine that already runs there: one module an engine.

``polyattn.distributed.dask`` uses Dask, ``polyattn.distributed.torch`` torch.distributed, ``polyattn.distributed.jax``
JAX's meshes. Scheduling, transport and collectives are the engine's. Importing this package imports no engine.
"""

from ._plan import Machine, Plan, Shape, plan

__all__ = ["Machine", "Plan", "Shape", "plan"]
