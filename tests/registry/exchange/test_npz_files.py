"""Other people's matrices, and damaged files."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest

from registry.errors import BadInput, Unparseable, Unsupported
from registry.exchange.vector_file import Keys
from registry.exchange.vector_formats import open_vectors
from registry.statuses import Status

NAMES = np.array(["org/a", "org/ünï-模型"])
VALUES = np.array([[-1.0, np.nan, -3.5], [-np.inf, -2.0, -1e300]])


def npz(tmp_path, **arrays):
    path = tmp_path / "matrix.npz"
    np.savez(path, **arrays)
    return path


def test_a_plain_matrix(tmp_path):
    path = npz(tmp_path, models=NAMES, values=VALUES, texts=np.array(["x", "y", "z"]))
    (file,) = open_vectors([path])
    assert [row.name for row in file.rows] == NAMES.tolist()
    assert file.rows[0].statuses.tolist() == [0, Status.NOT_SCORED, 0]
    assert file.rows[1].statuses.tolist() == [Status.NON_FINITE, 0, Status.NON_FINITE]
    assert file.rows[1].values[1] == np.float32(-2)
    assert np.isnan(file.rows[1].values[[0, 2]]).all()
    assert (file.heading.texts.ids, file.heading.texts.hashes) == (("x", "y", "z"), None)
    assert file.heading.space is None


def test_named_arrays_and_another_unit(tmp_path):
    path = npz(tmp_path, bpb=-VALUES[:1, [0, 2]], names=NAMES[:1].astype("S"), doc=np.array([7, 8]))
    keys = Keys(values="bpb", models="names", texts="doc", unit="bits_per_byte")
    (file,) = open_vectors([path], keys)
    assert file.rows[0].values.tolist() == [1.0, 3.5]
    assert file.heading.texts.ids == ("7", "8")
    assert file.heading.unit == "bits_per_byte"


def test_a_mask_of_ones_own(tmp_path):
    valid = np.array([[True, True, False], [True, True, True]])
    (file,) = open_vectors([npz(tmp_path, models=NAMES, values=VALUES, valid=valid)])
    assert file.rows[0].statuses.tolist() == [0, Status.NOT_SCORED, Status.NOT_SCORED]


@pytest.mark.parametrize(
    ("arrays", "keys", "error", "message"),
    [
        ({"models": NAMES, "values": VALUES.T}, {}, BadInput, r"shape \(3, 2\), and there are 2 model names"),
        ({"models": NAMES, "values": VALUES[0]}, {}, BadInput, r"shape \(3,\)"),
        ({"models": NAMES[:0], "values": VALUES[:0]}, {}, BadInput, r"shape \(0, 3\)"),
        ({"models": NAMES, "values": VALUES > 0}, {}, BadInput, "is bool, not numbers"),
        ({"models": NAMES, "values": VALUES.astype(complex)}, {}, BadInput, "is complex128, not numbers"),
        ({"models": NAMES[[0, 0]], "values": VALUES}, {}, BadInput, "'org/a' is there twice, in rows 0 and 1"),
        ({"models": np.array(["a", ""]), "values": VALUES}, {}, BadInput, "model 1: '' cannot name a model"),
        ({"models": np.array(["a", "b\nc"]), "values": VALUES}, {}, BadInput, "cannot name a model"),
        ({"models": np.array(["a", "b" * 301]), "values": VALUES}, {}, BadInput, "cannot name a model"),
        ({"models": np.array(["a", "b\ud800"]), "values": VALUES}, {}, BadInput, "cannot name a model"),
        ({"models": VALUES, "values": VALUES}, {}, BadInput, "not a list of names"),
        ({"models": NAMES, "values": VALUES, "valid": VALUES}, {}, BadInput, "its `valid` is float64"),
        ({"models": NAMES, "values": VALUES, "texts": NAMES}, {}, BadInput, "2 texts in 'texts', 3 columns"),
        ({"models": NAMES, "values": -VALUES}, {}, BadInput, "never above 0"),
        ({"models": NAMES, "values": VALUES}, {"unit": "bits_per_byte"}, BadInput, "never below 0"),
        ({"models": NAMES, "values": VALUES}, {"unit": "bits"}, BadInput, "'bits' is not a unit"),
        ({"models": NAMES, "loss": VALUES}, {}, BadInput, r"no array 'values'; there are .*loss float64\[2, 3\]"),
        ({"models": NAMES, "values": VALUES}, {"models": "names"}, BadInput, "no array 'names'"),
        ({"space": np.array("{}"), "values": VALUES}, {}, Unparseable, "lacks models"),
    ],
)
def test_what_does_not_fit(tmp_path, arrays, keys, error, message):
    with pytest.raises(error, match=message):
        open_vectors([npz(tmp_path, **arrays)], Keys(**keys))


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_objects_inside_are_never_loaded(tmp_path):
    mark = tmp_path / "was-run"
    path = tmp_path / "matrix.npz"
    np.savez(path, models=np.array([Touch(mark)], dtype=object), values=VALUES[:1])
    mark.unlink(missing_ok=True)
    with pytest.raises(Unsupported, match="'models' holds pickled Python objects"):
        open_vectors([path])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("models.npy", pickle.dumps(Touch(mark)))
    with pytest.raises(Unparseable):
        open_vectors([path])
    assert not mark.exists()


def header(shape):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return out.getvalue()


def test_a_shape_that_is_not_there_is_not_allocated(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("values.npy", header((1 << 40, 1 << 10)))
    with pytest.raises(Unparseable, match="claims the shape"):
        open_vectors([path])


def test_a_file_that_unpacks_beyond_measure(tmp_path, monkeypatch):
    from registry.exchange import npz as module

    monkeypatch.setattr(module, "MAX_BYTES", 1 << 10)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, models=NAMES[:1], values=np.zeros((1, 1 << 12)))
    with pytest.raises(BadInput, match="unpacks to"):
        open_vectors([path])


def test_damage_at_any_place(tmp_path):
    whole = npz(tmp_path, models=NAMES, values=VALUES).read_bytes()
    path = tmp_path / "damaged.npz"
    for end in range(4, len(whole), 37):
        path.write_bytes(whole[:end])
        with pytest.raises(BadInput):
            open_vectors([path])
    drawn = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[drawn.integers(4, len(whole))] ^= 1 << drawn.integers(8)
        path.write_bytes(damaged)
        try:
            open_vectors([path])
        except Exception as error:
            if not isinstance(error, BadInput):
                raise


def test_a_parquet_table_of_somebody_else(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "m.parquet"
    lists = pa.array([[-1.0, None], [-2.0, -3.0]], pa.list_(pa.float64()))
    ids = pa.array([["x", "y"], None], pa.list_(pa.string()))
    pq.write_table(pa.table({"name": ["a", "b"], "lp": lists, "ids": ids}), path)
    keys = Keys(values="lp", models="name", texts="ids")
    (file,) = open_vectors([path], keys)
    assert file.rows[0].statuses.tolist() == [0, Status.NOT_SCORED]
    assert file.rows[1].values.tolist() == [-2.0, -3.0]
    assert file.heading.texts.ids == ("x", "y")
    for wrong, message in [
        (Keys(), "0 columns 'model'; there are name string"),
        (Keys(values="name", models="name"), "is string, not list<number>"),
    ]:
        with pytest.raises(BadInput, match=message):
            open_vectors([path], wrong)
    pq.write_table(pa.table({"model": ["a", "b"], "values": [[-1.0], [-2.0, -3.0]]}), path)
    with pytest.raises(BadInput, match=r"lengths \[1, 2\]"):
        open_vectors([path])
    pq.write_table(pa.table({"model": ["a"], "values": [[-1.0]]}, metadata={"modelkin": json.dumps({})}), path)
    with pytest.raises(Unparseable, match="lacks revision"):
        open_vectors([path])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(Unparseable):
        open_vectors([path])
