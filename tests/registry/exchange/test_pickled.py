"""A pickle is read, never run."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct

import numpy as np
import pytest

from registry.errors import Unparseable, Unsupported
from registry.exchange import modelmap, pickled
from registry.statuses import Status


def written(tmp_path, content, protocol=4):
    path = tmp_path / "log-likelihood.pkl"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=protocol))
    return path


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_every_protocol(tmp_path, protocol, order):
    vectors = {
        "org/m": np.array([-626.65048254, -437.79926527, np.nan], f"{order}f8"),
        "org/ünï": np.array([-1.5, -np.inf, -3], f"{order}f4"),
        "org/list": [-1, -2.5, np.float64(-3)],
    }
    file = modelmap.read_pickle(written(tmp_path, vectors, protocol))
    assert [row.name for row in file.rows] == list(vectors)
    assert file.rows[0].values[:2].tolist() == np.float32([-626.65048254, -437.79926527]).tolist()
    assert file.rows[0].statuses.tolist() == [0, 0, Status.NOT_SCORED]
    assert file.rows[1].statuses.tolist() == [0, Status.NON_FINITE, 0]
    assert file.rows[2].values.tolist() == [-1.0, -2.5, -3.0]
    assert file.heading.texts.count == 3


def test_a_two_dimensional_array_keeps_its_order(tmp_path):
    for order in "CF":
        array = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int16, order=order)
        assert pickled.read(written(tmp_path, array)).value.tolist() == array.tolist()


def test_the_old_and_the_new_home_of_numpys_names(tmp_path):
    new = pickle.dumps({"a": np.array([-1.0])}, protocol=2)
    assert b"numpy._core.multiarray" in new
    old = new.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert modelmap.read_pickle(written(tmp_path, old)).rows[0].values.tolist() == [-1.0]


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_it_is_run(tmp_path, protocol):
    mark = tmp_path / "was-run"
    for malicious, name in [
        (Runs(os.system, f"touch {mark}"), "system"),
        (Runs(builtins.eval, f"open({str(mark)!r}, 'w')"), "eval"),
        (Runs(builtins.open, str(mark), "w"), "open"),
        (Runs(getattr, "text", "join"), "getattr"),
        (Runs(np.fromfile, str(mark)), "fromfile"),
    ]:
        content = {"org/m": np.array([-1.0]), "org/n": malicious}
        with pytest.raises(Unsupported, match=rf"asks for \S*{name}; only numbers"):
            modelmap.read_pickle(written(tmp_path, content, protocol))
        assert not mark.exists()


def test_a_name_is_refused_even_where_it_is_not_called(tmp_path):
    with pytest.raises(Unsupported, match=r"subprocess\.Popen"):
        pickled.read(written(tmp_path, b"csubprocess\nPopen\n."))


@pytest.mark.parametrize(
    "content",
    [
        b"(S'x'\nios\nsystem\n.",  # INST
        b"\x80\x02P1\n.",  # persistent id
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x02}(K\x01K\x02ubcnumpy\ndtype\n.",
        b"\x80\x04\x8f.",  # a set
    ],
)
def test_instructions_that_build_objects_are_refused(tmp_path, content):
    with pytest.raises((Unsupported, Unparseable)):
        pickled.read(written(tmp_path, content))


def array_with(shape, code, content):
    """What numpy writes for an array, with arguments of one's own."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, protocol=2)
    out.write(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01bt")
    out.write(b"R(K\x01")
    pickler.save(shape)
    out.write(b"cnumpy\ndtype\n(")
    pickler.save(code)
    out.write(b"K\x00K\x01tR(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
    pickler.save(content)
    out.write(b"tb.")
    return out.getvalue()


def test_the_forged_array_is_what_numpy_writes(tmp_path):
    whole = array_with((2,), "f8", struct.pack("<2d", -1, -2).decode("latin-1"))
    assert pickled.read(written(tmp_path, whole)).value.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("shape", "code", "content"),
    [
        ((1 << 60,), "f8", "x" * 8),
        ((-1,), "f8", "x" * 8),
        ((1,), "f8", "x" * 7),
        ((1,), "O8", "x" * 8),
        ((1,), "V8", "x" * 8),
        ((1,), "f8,f8", "x" * 16),
        ((True,), "f8", "x" * 8),
        ((1, 1, 1), "f8", "x" * 8),
        (1, "f8", "x" * 8),
        ((1,), "f8", 5),
        ((1,), 8, "x" * 8),
        ((1,), "f8", "\u4e2d" * 8),
    ],
)
def test_numpy_is_never_asked_to_believe_a_description(tmp_path, shape, code, content):
    with pytest.raises((Unsupported, Unparseable)):
        pickled.read(written(tmp_path, array_with(shape, code, content)))


def test_object_arrays_and_data_frames_are_refused_by_name(tmp_path):
    with pytest.raises(Unsupported, match="array of type 'O8'"):
        pickled.read(written(tmp_path, np.array(["a", None], dtype=object)))
    with pytest.raises(Unsupported, match=r"pandas\.core\.frame\.DataFrame"):
        pickled.read(written(tmp_path, b"\x80\x02cpandas.core.frame\nDataFrame\n)\x81."))


def test_a_deep_nest_does_not_end_the_process(tmp_path):
    deep = b"\x80\x02" + b")" + b"\x85" * 300_000
    with pytest.raises(Unparseable, match="dict key is a tuple"):
        pickled.read(written(tmp_path, deep.replace(b"\x80\x02", b"\x80\x02}") + b"K\x01s."))
    with pytest.raises(Unsupported, match="holds a tuple"):
        modelmap.read_pickle(written(tmp_path, deep + b"."))


def test_every_truncation_is_an_error_and_nothing_else(tmp_path):
    whole = pickle.dumps({"org/m": np.array([-1.0, -2.0]), "b": [-1.0, -2.0]})
    for end in range(1, len(whole)):
        with pytest.raises((Unparseable, Unsupported)):
            modelmap.read_pickle(written(tmp_path, whole[:end]))


def test_random_damage_is_an_error_or_other_numbers(tmp_path):
    whole = bytearray(pickle.dumps({"org/m": np.array([-1.0, -2.0]), "b": [-1.0, -2.0]}))
    drawn = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[drawn.integers(len(whole))] = drawn.integers(256)
        try:
            modelmap.read_pickle(written(tmp_path, bytes(damaged)))
        except Exception as error:
            from registry.errors import BadInput

            if not isinstance(error, BadInput):
                raise


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({}, "holds a dict"),
        ({"a": "text"}, "'a' is not a name with a vector"),
        ({1: [-1.0]}, "1 is not a name"),
        ({"a": [-1.0], "b": [-1.0, -2.0]}, "'b' has 2 values, 'a' has 1"),
        ({"a": [10**400]}, "'a' is not a name with a vector"),
        ({"a": [True]}, "'a' is not a name with a vector"),
        ({"a": np.array(["x"])}, "'a' is not a name with a vector"),
        ({"a": [-1.0], "a ": [3.0]}, "never above 0"),
    ],
)
def test_other_content_is_refused(tmp_path, content, message):
    from registry.errors import BadInput

    with pytest.raises(BadInput, match=message):
        modelmap.read_pickle(written(tmp_path, content))
