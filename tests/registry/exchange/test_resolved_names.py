"""Vectors imported under a name, after somebody said which model the name is."""

import numpy as np
from sqlalchemy import text

from registry.exchange.vector_file import Keys
from registry.exchange.vector_formats import open_vectors
from registry.queries import models
from registry.queries.vector_export import export_vectors
from registry.queries.vector_import import import_vectors


def test_what_was_imported_under_a_name_is_not_stored_again_under_its_model(session, tmp_path):
    matrix = tmp_path / "matrix.npz"
    values = np.random.default_rng(0).normal(-590, 200, (2, 6)).astype(np.float32)
    np.savez(matrix, models=["org/a", "org/b"], texts=[f"t{n}" for n in range(6)], values=values)
    (file,) = open_vectors([matrix], Keys())
    assert import_vectors(session, file).added == 2
    (name,) = [row for row in models.list_models(session).items if row.handle == "org/a"]
    target = models.register_named(session, "org/real", "test")
    # As `model resolve` does for a registered model.
    session.execute(text("update models set kind = 'folder' where id = :id"), {"id": target.id})
    session.execute(text("update models set resolved_to_id = :to where id = :id"), {"to": target.id, "id": name.id})
    session.expire_all()

    again = import_vectors(session, file)
    assert (again.added, again.already_there) == (0, 2), "the strangers' file still says the name"
    out = tmp_path / "ours.npz"
    export_vectors(session, out, text_set="matrix")
    (ours,) = open_vectors([out], Keys())
    assert "org/real" in [row.name for row in ours.rows]
    again = import_vectors(session, ours)
    assert (again.added, again.already_there) == (0, 2), "our own file says the model"
