"""The suite runs on the backend that ``--polyattn-backend`` names (numpy by default), with the fixtures of the kit.

``@pytest.mark.needs("autograd")`` leaves a test out where the library lacks a feature, and says why; which features
there are, and who lacks one, stands in ``polyattn.backend.FEATURES`` and in the plugins.
``@pytest.mark.only("torch", reason=…)`` is for what looks at one plugin.
"""

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["polyattn.testing.plugin"]

# The same examples in every run; ``--hypothesis-profile=explore`` looks for new ones, and ``thorough`` for more.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, database=None, max_examples=100, **COMMON)
settings.register_profile("compiling", settings.get_profile("fixed"), max_examples=8)
settings.register_profile("explore", max_examples=1000, **COMMON)
settings.register_profile("thorough", settings.get_profile("explore"), max_examples=10_000)

# What looks at one backend in any case, or at none: it runs once, with numpy's suite.
ONCE = {
    "test_bench.py",
    "test_benchmark_scripts.py",
    "test_check.py",
    "test_checkpoint_damage.py",
    "test_checkpoint_shards.py",
    "test_cupy_kernel.py",
    "test_docs.py",
    "test_gpu_benchmark.py",
    "test_jax_sharded.py",
    "test_jax_training.py",
    "test_new_backend.py",
    "test_numpy_kernels.py",
    "test_numpy_threads.py",
    "test_onnx_graph.py",
    "test_pictures.py",
    "test_plot.py",
    "test_torch_pipelines.py",
    "test_torch_training.py",
    "test_weight_files.py",
}


def pytest_ignore_collect(collection_path, config):
    # Others' suites need packages of their own: they run where they are named, as ``nox -s suites`` does.
    if collection_path.name == "suites":
        return True
    once = collection_path.name in ONCE and config.getoption("--polyattn-backend") not in (None, "numpy")
    return True if once else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "needs(feature, ...): leave out where the backend lacks a feature")
    config.addinivalue_line("markers", "long: left out unless ``-m`` asks for it, as ``nox -s compile`` does")
    config.addinivalue_line("markers", "only(backend, ..., reason=None): leave out in the runs of all other backends")
    from polyattn.testing.features import lacking  # not before pytest has loaded the plugin, whose asserts it rewrites
    from polyattn.testing.plugin import TARGET

    if config.getoption("--hypothesis-profile", None) is None:
        # A library that compiles each operation for each shape takes seconds an example.
        settings.load_profile("compiling" if lacking(config.stash[TARGET], "any_shape") else "fixed")


def pytest_runtest_setup(item):
    from polyattn.testing.features import need
    from polyattn.testing.plugin import TARGET

    target = item.config.stash[TARGET]
    for mark in item.iter_markers("only"):
        if target.name not in mark.args:
            pytest.skip(mark.kwargs["reason"])
    for mark in item.iter_markers("needs"):
        need(target, *mark.args)
