"""SciPy's own tests of softmax, log_softmax and logsumexp under SCIPY_ARRAY_API."""

import json
from collections import Counter
from pathlib import Path

import scipy

PLUGIN = Path(__file__).with_name("scipy_routed.py")
LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "array-api-strict": "array_api_strict"}
# How many tests SciPy 1.17 has, their parameters multiplied out.
TESTS = {"TestLogSumExp": 389, "TestSoftmax": 5, "TestLogSoftmax": 12, "test_logsumexp": 1}
# How often polyattn is called. On JAX, where SciPy compiles what it tests, a call is counted when it is traced.
# The devices of which each library has several make the difference.
CALLS = {
    "numpy": {"softmax": 14, "log_softmax": 12, "attention_forward": 33},
    "torch": {"softmax": 14, "log_softmax": 12, "attention_forward": 31},
    "array-api-strict": {"softmax": 13, "log_softmax": 11, "attention_forward": 41},
    "jax": {"softmax": 11, "log_softmax": 12, "attention_forward": 26},
}
# What does not pass, and why.
NEAR_ZERO = (
    "attention's log-sum-exp is exact to the last place of the largest score, not relatively to a result near zero"
)
PROMOTION = "array-api-strict does not promote integers to floating numbers (SciPy expects it to fail)"
DEVICES = "JAX has no device of an array while it is traced, jax-ml/jax#26000 (SciPy expects it to fail)"
FAILED = {"TestLogSumExp.test_gh18295[{}]": NEAR_ZERO}
SKIPPED = {
    "array-api-strict": {
        "TestSoftmax.test_softmax_int_array[{}]": PROMOTION,
        "TestLogSoftmax.test_log_softmax_int_array[{}]": PROMOTION,
    },
    "jax": {f"TestLogSumExp.test_device[{{}}-{number}]": DEVICES for number in ("1.0", "1j", "x_raw2")},
}


def test_scipys_tests_routed_through_polyattn(backend, run_foreign):
    library = LIBRARIES[backend]
    rootdir = Path(scipy.__file__).parents[1]
    run = run_foreign(
        f"--rootdir={rootdir}", "--pyargs", "scipy.special.tests.test_logsumexp", plugin=PLUGIN,
        SCIPY_ARRAY_API=json.dumps([library]),
    )  # fmt: skip
    outcomes = {test: outcome for tests in run.outcomes.values() for test, outcome in tests.items()}
    assert Counter(test.partition(".")[0] for test in outcomes) == TESTS
    others = {test: outcome for test, outcome in outcomes.items() if outcome != "passed"}
    expected = {"failure": FAILED, "skipped": SKIPPED.get(backend, {})}
    named = {test.format(library): outcome for outcome, tests in expected.items() for test in tests}
    assert others == named, run.output
    (calls,) = run.calls.values()
    assert calls == CALLS[backend]
