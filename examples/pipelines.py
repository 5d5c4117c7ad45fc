"""Attention between SciPy and scikit-learn, on the arrays of one library in every step.

A pipeline classifies handwritten digits: SciPy's Fourier transform adds the spectrum of each image, scikit-learn
reduces it to thirty principal components of norm 1, and each image then attends to the training images, whose classes
are the values. Attention is the same formula as the regression of Nadaraya and Watson (1964). Five-fold
cross-validation gives every image the probabilities of its ten classes; SciPy computes their entropy, a measure of
uncertainty.

    python examples/pipelines.py --arrays torch
    python examples/pipelines.py --arrays torch --backend jax

With ``--backend`` another library computes attention, and only attention. Needs scikit-learn 1.9 and SciPy 1.17.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"  # SciPy reads it once, when it is imported

import scipy.fft
import scipy.special
import sklearn
from array_api_compat import array_namespace
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import accuracy_score
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer

import polyattn as pa

LIBRARIES = ("numpy", "torch", "cupy", "array-api-strict")  # not JAX: scikit-learn writes into arrays
SURE = 0.9  # the fraction of images with the lowest entropy
Array = Any


def with_spectrum(pixels: Array) -> Array:
    """Return the pixels (images, 64) concatenated with the amplitudes of their Fourier transform (images, 40)."""
    xp = array_namespace(pixels)
    images = xp.reshape(pixels, (-1, 8, 8))
    waves = xp.abs(scipy.fft.rfft2(images)) / 8  # (images, 8, 5); the division gives both the same scale
    return xp.concat([pixels, xp.reshape(waves, (-1, 40))], axis=1)  # (images, 104)


class AttentionClassifier(ClassifierMixin, BaseEstimator):
    """Attend to the training examples, with their classes as values.

    The probability of a class is the attention weight of its examples: softmax(scale · x · Xᵀ) · Y, with the examples X
    and their one-hot classes Y.
    """

    def __init__(self, scale: float = 30.0, backend: str | None = None) -> None:
        self.scale = scale
        self.backend = backend

    def fit(self, x: Array, y: Array) -> "AttentionClassifier":
        xp = array_namespace(x, y)
        self.classes_ = xp.unique_values(y)
        self.examples_ = x  # (examples, features)
        self.one_hot_ = xp.astype(y[:, None] == self.classes_[None, :], x.dtype)  # (examples, classes)
        return self

    def predict_proba(self, x: Array) -> Array:
        return pa.attention(x, self.examples_, self.one_hot_, scale=self.scale, backend=self.backend)  # (n, classes)

    def predict(self, x: Array) -> Array:
        xp = array_namespace(x)
        return xp.take(self.classes_, xp.argmax(self.predict_proba(x), axis=1))


def pipeline(backend: str | None = None) -> Pipeline:
    return Pipeline([
        ("spectrum", FunctionTransformer(with_spectrum)),
        ("components", PCA(30, svd_solver="covariance_eigh")),
        ("length", Normalizer()),
        ("attention", AttentionClassifier(backend=backend)),
    ])  # fmt: skip


def run(arrays: str, backend: str | None) -> tuple[Array, float, float, int]:
    """Return the class probabilities, the accuracy, that of the surest images, and the number of moved arrays."""
    pixels, digits = load_digits(return_X_y=True)
    x = pa.to_backend((pixels / 16).astype("float32"), arrays)
    y = pa.to_backend(digits.astype("int32"), arrays)
    folds = KFold(5, shuffle=True, random_state=0)
    with sklearn.config_context(array_api_dispatch=True), pa.transfers() as account:
        weights = cross_val_predict(pipeline(backend), x, y, cv=folds, method="predict_proba")  # (images, classes)
        xp = array_namespace(weights)
        guesses = xp.argmax(weights, axis=1)
        unsure = xp.sum(scipy.special.entr(weights), axis=1)
        surest = xp.argsort(unsure)[: int(SURE * len(digits))]
        accuracy = accuracy_score(y, guesses)
        sure = accuracy_score(xp.take(y, surest), xp.take(guesses, surest))
    return weights, float(accuracy), float(sure), account.count


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", default="numpy", choices=LIBRARIES, help="their library; default: %(default)s")
    parser.add_argument("--backend", help="the backend of attention; default: the library of the arrays")
    options = parser.parse_args(arguments)
    weights, accuracy, sure, moved = run(options.arrays, options.backend)
    kind = f"{type(weights).__module__}.{type(weights).__name__}"
    print(f"{kind} in, {kind} out; {moved} arrays moved for attention")
    print(f"accuracy {accuracy:.4f}; of the surest {SURE:.0%} of the images {sure:.4f}")
    return accuracy


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"pipelines: {error}")
