"""JAX's arrays that lie on several devices: results, gradients and layers, and what has to travel."""

import pytest


@pytest.mark.parametrize("part", ["attention", "layers", "explicit_axes"])
def test_four_devices(part, program):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    program("jax_sharded", part, PYTHONWARNINGS="error", **flags)
