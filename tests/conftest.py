"""The suite runs on the backend that ``--polyattn-backend`` names (numpy by default), with the fixtures of the kit."""

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
    "test_cupy_kernel.py",
    "test_docs.py",
    "test_gpu_benchmark.py",
    "test_numpy_kernels.py",
    "test_numpy_threads.py",
    "test_plot.py",
}


def pytest_ignore_collect(collection_path, config):
    # Others' suites need packages of their own: they run where they are named, as ``nox -s suites`` does.
    if collection_path.name == "suites":
        return True
    once = collection_path.name in ONCE and config.getoption("--polyattn-backend") not in (None, "numpy")
    return True if once else None


def pytest_configure(config):
    if config.getoption("--hypothesis-profile", None) is None:
        # A library that compiles each operation for each shape takes seconds an example.
        settings.load_profile("compiling" if config.getoption("--polyattn-backend") == "jax" else "fixed")
