"""The extent of a selection with exceptions, generators, tasks, threads and notebook cells: none leaks or is lost."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from at_once import run_at_once

import polyattn as pa

pytestmark = pytest.mark.usefixtures("other")
X = np.arange(6.0).reshape(2, 3)


def now():
    """Return the current selection, as (backend, source)."""
    selection = pa.get_backend()
    return selection and (selection.backend, selection.source)


def computed(**arguments):
    return pa.attention_forward(X, X, X, **arguments)[1].place.backend.name


def test_scopes_nest_and_end():
    with pa.use_backend("numpy") as outer:
        with pa.use_backend("other-one", device="north:1") as inner:
            assert pa.get_backend() is inner
        assert pa.get_backend() is outer
        with pytest.raises(KeyError), pa.use_backend("other-one"):
            raise KeyError
        assert pa.get_backend() is outer
        with pytest.raises(pa.UnknownBackendError), pa.use_backend("nunpy"):
            raise AssertionError("entered")
        assert pa.get_backend() is outer
    assert now() is None


def test_scope_around_a_function():
    @pa.use_backend("other-one")
    def function():
        return computed()

    assert function() == function() == "other-one"
    assert now() is None


def test_a_generator_that_is_closed_early():
    def rows():
        with pa.use_backend("other-one"):
            yield computed()

    generator = rows()
    assert next(generator) == "other-one"
    generator.close()
    assert now() is None


def test_generators_that_end_out_of_turn():
    """The first scope to begin is the first to end: neither restores the other's selection, and none remains."""

    def selecting(name):
        with pa.use_backend(name):
            yield

    first, second = selecting("numpy"), selecting("other-one")
    next(first)
    next(second)
    first.close()
    assert now() == ("other-one", "use_backend")
    second.close()
    assert now() is None


def test_a_generator_closed_in_another_context():
    """As when an event loop closes an asynchronous generator, or garbage collection any generator."""

    def selecting():
        with pa.use_backend("other-one"), pa.transfers():
            yield

    generator = selecting()
    contextvars.copy_context().run(next, generator)
    assert now() is None
    generator.close()
    assert now() is None

    def entered_here():
        generator = selecting()
        next(generator)
        contextvars.copy_context().run(generator.close)
        return now()  # this context entered it, and nothing left it here

    assert contextvars.copy_context().run(entered_here) == ("other-one", "use_backend")
    assert now() is None


def test_tasks_have_scopes_of_their_own():
    async def work(name, turns):
        with pa.use_backend(name), pa.transfers() as account:
            for _ in range(turns):
                assert now()[0] == name
                assert computed() == name
                await asyncio.sleep(0)
            return account.count

    async def main():
        counts = await asyncio.gather(*(work(name, turns) for name in ("numpy", "other-one") for turns in (1, 3, 5)))
        assert now() is None
        return counts

    # Each round moves three inputs, out and the pair of row statistics; each task counts its own only.
    assert asyncio.run(main()) == [0, 0, 0, 6, 18, 30]


def test_a_task_starts_with_its_makers_selection():
    async def main():
        with pa.use_backend("other-one"):
            task = asyncio.create_task(asyncio.to_thread(computed))
        assert now() is None
        return await task

    assert asyncio.run(main()) == "other-one"


def test_a_scope_is_its_threads():
    with pa.use_backend("other-one"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(now).result() is None
        assert pool.submit(contextvars.copy_context().run, now).result() == ("other-one", "use_backend")


def test_the_default_is_everyones():
    with ThreadPoolExecutor(1) as pool:
        pa.set_backend("other-one", device="north")
        assert pool.submit(pa.get_backend).result() == ("other-one", "north:0", "set_backend")
        pool.submit(pa.set_backend, "numpy").result()
        assert now() == ("numpy", "set_backend")
        with pa.use_backend("other-one"):
            pool.submit(pa.set_backend, None).result()
            assert now() == ("other-one", "use_backend")
        assert now() is None


def test_a_default_that_cannot_be_changes_nothing():
    pa.set_backend("other-one")
    for name, device in (("nunpy", None), ("other-one", "south"), (None, "cpu")):
        with pytest.raises(pa.PolyattnError):
            pa.set_backend(name, device=device)
        assert now() == ("other-one", "set_backend")


def test_threads_select_for_themselves():
    """Ten threads, each with its own selection, while the default changes."""

    def work(i):
        name = ("numpy", "other-one")[i % 2]
        for _ in range(30):
            pa.set_backend(("numpy", "other-one", None)[i % 3])
            with pa.use_backend(name):
                out, cache = pa.functional.softmax_forward(np.full((2, 3), float(i)))
            assert cache.place.backend.name == name
            assert np.allclose(out, 1 / 3)

    run_at_once(work, 10)


def test_notebook_cells():
    """Each cell runs in its own context, as in a notebook: set_backend persists, a scope ends with its cell."""
    names = {"pa": pa, "X": X}

    def cell(source):
        contextvars.copy_context().run(exec, source, names)

    cell("pa.set_backend('other-one')")
    cell("a = pa.get_backend().backend")
    cell("with pa.use_backend('numpy'): b = pa.get_backend().backend")
    cell("c = pa.get_backend().backend; pa.set_backend(None)")
    cell("d = pa.get_backend()")
    assert [names[key] for key in "abcd"] == ["other-one", "numpy", "other-one", None]
