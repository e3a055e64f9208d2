"""Vectors out of one database and into another: byte by byte, once, and never over what is there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from registry import database
from registry.errors import Ambiguous, BadInput, Conflict, NotFound, Unparseable, Unsupported
from registry.exchange.vector_file import Keys
from registry.exchange.vector_formats import open_vectors
from registry.identity import Candidate, hub_identity
from registry.queries import model_names, models, textsets, transforms, vectors
from registry.queries.vector_export import export_vectors
from registry.queries.vector_import import import_vectors
from registry.queries.vectors import NewVector
from registry.statuses import Status
from registry.textsets import Pair, freeze

ROWS = "select model_id, dtype, engine_version, path, profile, unit, checksum from vectors order by id"
PAIRS = [Pair(f"p{n}", f"réponse {n}") for n in range(5)]
SPEC = [{"edit": "append", "text": "\nBe brief."}]
SHARED = Path(__file__).parents[4] / "shared" / "data" / "perplexity_correlations_bpb_89x263.npz"


def hub(session, handle, commit="a" * 40, file=""):
    identity = hub_identity(handle, commit, file)
    return models.register(session, Candidate("hub", handle, commit, identity, handle, file))[0]


def fill(session, *, profile="chat", transform="base", seed=0, engine=1, pairs=PAIRS):
    """Three models on five texts; one has texts without a value."""
    texts = textsets.add(session, "five", freeze(pairs))
    drawn = np.random.default_rng(seed)
    made = []
    for number, model in enumerate(
        [hub(session, "Org/a"), hub(session, "Org/b"), models.register_named(session, "org/only a name", "test")]
    ):
        statuses = np.zeros(5, np.uint8)
        if number == 1:
            statuses[[1, 4]] = Status.TOO_LONG, Status.SPLIT
        made.append(
            NewVector(
                model_id=model.id,
                text_set_id=texts.id,
                transform_id=transforms.get(session, transform).id,
                profile=profile,
                dtype="bfloat16" if number == 1 else "float32",
                engine_version=engine,
                log_likelihoods=drawn.normal(-590, 200, 5).astype(np.float32),
                statuses=statuses,
                token_counts=drawn.integers(1, 99, 5).astype(np.int32),
                path="universal",
                template_hash="ab" * 32,
                noise_floor_nats=1e-6,
            )
        )
    vectors.insert_many(session, made)


def stored(session):
    """What a vector is, apart from ids: by model and dtype."""
    query = """
        select lower(m.handle), v.dtype, v.log_likelihoods, v.statuses, v.token_counts, v.checksum, v.n_ok, v.sum_value,
               v.tokens, v.unit, v.template_hash, v.noise_floor_nats
        from vectors v join models m on m.id = v.model_id order by 1, 2
    """
    return [
        tuple(bytes(one) if isinstance(one, memoryview) else one for one in row) for row in session.execute(text(query))
    ]


@pytest.fixture
def other(another_database):
    """A session on a database that knows nothing of the first."""
    engine = database.make_engine(another_database)
    with Session(engine, expire_on_commit=False) as opened:
        yield opened
    engine.dispose()


@pytest.fixture(params=["npz", "parquet"])
def out(request, tmp_path):
    return tmp_path / f"v.{request.param}"


def test_a_model_that_is_registered_after_its_vectors_has_them(session, other, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    textsets.add(other, "five", freeze(PAIRS))
    (file,) = open_vectors([out])
    assert import_vectors(other, file).attached == 0
    named = models.find(other, "org/b")
    # Under another handle, as a folder may be: what proves it is the identity that the file stated.
    found = Candidate("hub", "mine/b", "a" * 40, hub_identity("org/b", "a" * 40), "org/b")
    model, _ = models.register(other, found)
    assert vectors.held_by(other, model.id) == []
    assert [one.id for one in model_names.claim_names(other, model, actor="ann")] == [named.id]
    assert len(vectors.held_by(other, model.id)) == 1
    again = import_vectors(other, file)
    assert (again.added, again.already_there, again.attached) == (0, 3, 1)


def test_into_another_database_byte_by_byte(session, other, out):
    fill(session)
    done = export_vectors(session, out, text_set="five")
    assert (done.models, done.texts, done.profile, done.unit) == (3, 5, "chat", "nats")
    textsets.add(other, "otherwise", freeze(PAIRS))
    known = hub(other, "org/A")
    (file,) = open_vectors([out])
    answer = import_vectors(other, file)
    assert (answer.added, answer.already_there, answer.attached, answer.new_names) == (3, 0, 1, 2)
    assert (answer.text_set, answer.opaque, answer.profile) == ("otherwise", False, "chat")
    assert answer.space == done.space
    assert stored(other) == stored(session)
    rows = other.execute(text(ROWS)).all()
    assert {(row.engine_version, row.path) for row in rows} == {(0, f"import:{out.suffix[1:]}")}
    assert rows[0].model_id == known.id
    # A model that is not known here is a name which says what it was.
    named = models.find(other, "org/b")
    assert (named.kind, named.revision) == ("named", "a" * 40)

    # And back out: the same file but for what a name is.
    back = out.with_name("back" + out.suffix)
    export_vectors(other, back, text_set="otherwise")
    (again,) = open_vectors([back])
    assert [row.values.tobytes() for row in again.rows] == [row.values.tobytes() for row in file.rows]
    assert [row.token_counts.tobytes() for row in again.rows] == [row.token_counts.tobytes() for row in file.rows]


def test_equal_content_makes_equal_files(session, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    first = out.read_bytes()
    export_vectors(session, out, text_set="five", force=True)
    assert out.read_bytes() == first


def test_what_the_file_holds_for_anybody(session, tmp_path):
    fill(session)
    path = tmp_path / "v.npz"
    done = export_vectors(session, path, text_set="five")
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["models"].tolist() == ["Org/a", "Org/b", "org/only-a-name"]
        assert arrays["kinds"].tolist() == ["hub", "hub", "named"]
        assert arrays["dtypes"].tolist() == ["float32", "bfloat16", "float32"]
        assert arrays["engine_versions"].tolist() == [1, 1, 1]
        assert arrays["texts"].tolist() == [one.hex() for one in freeze(PAIRS).text_hashes]
        assert (arrays["values"].dtype, arrays["values"].shape) == (np.float32, (3, 5))
        assert np.array_equal(arrays["valid"], np.isfinite(arrays["values"]))
        assert arrays["valid"].sum() == 14
        assert str(arrays["space"]) == done.space
        assert json.loads(str(arrays["transform"])) == {"name": "base", "spec": [], "parts": []}


def test_a_second_import_adds_nothing(session, other, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    (file,) = open_vectors([out])
    # Here everything is stored already, as it was scored.
    assert (import_vectors(session, file).added, len(stored(session))) == (0, 3)
    for added in (3, 0):
        answer = import_vectors(other, file)
        assert (answer.added, answer.already_there) == (added, 3 - added)
    assert len(stored(other)) == 3


def test_unknown_texts_are_opaque_and_in_a_space_of_their_own(session, other, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    (file,) = open_vectors([out])
    for _ in range(2):
        answer = import_vectors(other, file)
        assert (answer.text_set, answer.opaque, answer.profile) == ("five", True, "imported:modelkin:chat")
    assert import_vectors(other, file, source="lab-7", text_set="five").profile == "imported:lab-7:chat"
    # Once the texts are known, the file joins the real space.
    real = textsets.add(other, "five-again", freeze(PAIRS))
    answer = import_vectors(other, file)
    assert (answer.text_set, answer.profile, answer.added) == (real.name, "chat", 3)
    with pytest.raises(Conflict, match="those of the text set 'five-again', not 'five'"):
        import_vectors(other, file, text_set="five")


def test_the_texts_must_be_in_the_same_order(session, other, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    textsets.add(other, "reversed", freeze(PAIRS[::-1]))
    assert import_vectors(other, open_vectors([out])[0]).opaque


def test_an_opaque_set_travels_whole(session, other, tmp_path, out):
    np.savez(tmp_path / "m.npz", models=["a", "b"], values=[[-1.0, np.nan], [-3.0, -4.0]], texts=["x", "ü"])
    answer = import_vectors(session, open_vectors([tmp_path / "m.npz"])[0], source="lab")
    export_vectors(session, out, text_set=answer.text_set)
    again = import_vectors(other, open_vectors([out])[0])
    assert (again.space, again.profile, again.opaque) == (answer.space, "imported:lab", True)
    assert [row[5] for row in stored(other)] == [row[5] for row in stored(session)]
    assert [one.source_id for one in textsets.texts(other, textsets.get(other, "m").id)] == ["x", "ü"]


def test_the_bundled_set_is_known_without_being_added(session, other, out):
    starter = textsets.get(session, "starter")
    n = starter.n_texts
    vectors.insert_many(
        session,
        [
            NewVector(
                hub(session, "org/a").id,
                starter.id,
                transforms.get(session, "base").id,
                "chat",
                "float32",
                1,
                np.full(n, -5, np.float32),
                np.zeros(n, np.uint8),
                np.ones(n, np.int32),
                "universal",
            )
        ],
    )
    export_vectors(session, out, text_set="starter")
    answer = import_vectors(other, open_vectors([out])[0])
    assert (answer.opaque, answer.profile) == (False, "chat")
    assert other.scalar(text("select response_bytes from vectors")) == textsets.response_bytes(other, answer_id(other))


def answer_id(session):
    return session.scalar(text("select text_set_id from vectors"))


def test_transforms_go_by_their_spec(session, other, out):
    transforms.add(session, "brief", SPEC)
    transforms.add(session, "repeat+brief", "repeat+brief")
    fill(session, transform="repeat+brief")
    export_vectors(session, out, text_set="five", transform="repeat+brief")
    (file,) = open_vectors([out])
    assert import_vectors(other, file).transform == "repeat+brief"
    assert transforms.get(other, "brief").spec == SPEC
    with pytest.raises(Conflict, match="says that its transform is 'repeat\\+brief', not 'base'"):
        import_vectors(other, file, transform="base")


def test_a_transform_that_has_another_name_or_another_meaning_here(session, other, out):
    transforms.add(session, "brief", SPEC)
    fill(session, transform="brief")
    export_vectors(session, out, text_set="five", transform="brief")
    (file,) = open_vectors([out])
    with other.begin_nested() as undone:
        transforms.add(other, "short", SPEC)
        assert import_vectors(other, file).transform == "short"
        undone.rollback()
    transforms.add(other, "brief", [{"edit": "append", "text": "!"}])
    with pytest.raises(Conflict, match="'brief' exists with another spec"):
        import_vectors(other, file)
    assert stored(other) == []


def test_nothing_to_export(session, tmp_path):
    textsets.add(session, "five", freeze(PAIRS))
    path = tmp_path / "v.npz"
    with pytest.raises(NotFound, match="nothing to export: text set five has no vectors for transform base, nor"):
        export_vectors(session, path, text_set="five")
    fill(session)
    with pytest.raises(NotFound, match="for transform cot; there are transform base in profile chat"):
        export_vectors(session, path, text_set="five", transform="cot")
    with pytest.raises(NotFound, match="in profile plain"):
        export_vectors(session, path, text_set="five", profile="plain")
    fill(session, profile="plain", seed=1)
    with pytest.raises(Ambiguous, match="chat in nats, plain in nats"):
        export_vectors(session, path, text_set="five")
    assert list(tmp_path.iterdir()) == []
    assert export_vectors(session, path, text_set="five", profile="plain").profile == "plain"


def test_a_file_is_written_whole_or_not_at_all(session, out, monkeypatch):
    fill(session)
    with pytest.raises(BadInput, match=r"has the ending '\.csv'"):
        export_vectors(session, out.with_suffix(".csv"), text_set="five")
    with pytest.raises(NotFound, match=r"folder .* does not exist"):
        export_vectors(session, out.parent / "none" / out.name, text_set="five")
    out.write_text("mine")
    with pytest.raises(Conflict, match="exists already"):
        export_vectors(session, out, text_set="five")

    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(vectors, "read_token_counts", broken)
    with pytest.raises(OSError, match="gone"):
        export_vectors(session, out, text_set="five", force=True)
    assert out.read_text() == "mine"
    assert list(out.parent.iterdir()) == [out]


def test_other_values_at_the_same_point(session, other, out):
    textsets.add(other, "five", freeze(PAIRS))
    fill(session)
    export_vectors(session, out, text_set="five")
    import_vectors(other, open_vectors([out])[0])
    before = stored(other)
    session.execute(text("delete from vectors"))
    fill(session, seed=1)
    export_vectors(session, out, text_set="five", force=True)
    (file,) = open_vectors([out])
    with pytest.raises(Conflict, match="other values of Org/a@aaaaaaaaaaaa were imported before"):
        import_vectors(other, file)
    assert stored(other) == before
    assert import_vectors(other, file, source="second-run").profile == "imported:second-run:chat"


def test_scored_vectors_stay_and_come_first(session, other, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    fill(other, seed=1)
    scored = {row.checksum for row in other.execute(text(ROWS))}
    assert import_vectors(other, open_vectors([out])[0]).added == 3
    texts = textsets.get(other, "five").id
    chosen = vectors.members(other, texts, transforms.get(other, "base").id, "chat", "nats")
    assert {one.checksum for one in chosen} == {bytes(one) for one in scored}


def test_all_or_nothing(session, other, tmp_path):
    np.savez(tmp_path / "m.npz", models=["org/a", "org/b", "ORG/A"], values=np.full((3, 2), -1.0), texts=["x", "y"])
    (file,) = open_vectors([tmp_path / "m.npz"])
    with pytest.raises(BadInput, match="'org/a' and 'ORG/A' are one model here"):
        import_vectors(session, file)
    for table in ("models", "text_sets", "vectors"):
        assert session.scalar(text(f"select count(*) from {table}")) == 0, table


def test_numbered_texts_need_a_name_and_keep_it(session, tmp_path):
    def written(name, count):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"index": n, "log-likelihood": -1.0 - n}) + "\n" for n in range(count)))
        return open_vectors([path])[0]

    first = written("org--a_float16.jsonl", 4)
    with pytest.raises(BadInput, match="numbers its 4 texts, but does not say which they are"):
        import_vectors(session, first)
    answer = import_vectors(session, first, text_set="pile")
    assert (answer.profile, answer.opaque, answer.first) == ("imported:modelmap", True, "org/a")
    # Another model's file lacks the last text; it is a gap, not another list.
    shorter = import_vectors(session, written("org--b_float16.jsonl", 3), text_set="pile")
    assert (shorter.space, shorter.not_scored) == (answer.space, 1)
    with pytest.raises(Conflict, match="'pile' is taken by another text set"):
        import_vectors(session, written("org--c_float16.jsonl", 5), text_set="pile")
    # Equal numbers of other texts are other texts.
    elsewhere = import_vectors(session, first, text_set="wiki")
    assert elsewhere.space != answer.space
    assert session.scalar(text("select dtype from vectors limit 1")) == "float16"


def test_numbers_never_join_a_set_with_text(session, tmp_path):
    fill(session)
    np.savez(tmp_path / "m.npz", models=["a"], values=np.full((1, 5), -1.0))
    with pytest.raises(Conflict, match="'five' is taken by another text set"):
        import_vectors(session, open_vectors([tmp_path / "m.npz"])[0], text_set="five")


def test_somebody_elses_numbers_on_our_texts_stay_apart(session, tmp_path):
    fill(session)
    hashes = [one.hex() for one in freeze(PAIRS).text_hashes]
    np.savez(tmp_path / "m.npz", models=["Org/a"], values=np.full((1, 5), -1.0), texts=hashes)
    answer = import_vectors(session, open_vectors([tmp_path / "m.npz"])[0], source="lab", transform="empty")
    assert (answer.text_set, answer.opaque, answer.profile) == ("five", False, "imported:lab")
    assert (answer.transform, answer.attached) == ("empty", 0)
    with pytest.raises(BadInput, match="'a lab' cannot name a source"):
        import_vectors(session, open_vectors([tmp_path / "m.npz"])[0], source="a lab")


def rewritten(path, **changes):
    """One of our own files with other arrays in it."""
    with np.load(path, allow_pickle=False) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    np.savez(
        path,
        **{name: change(kept[name]) for name, change in changes.items()}
        | {name: value for name, value in kept.items() if name not in changes},
    )
    return path


def put(place, value):
    def change(array):
        array = array.copy()
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"values": put((0, 0), np.nan)}, Unparseable, "the value nan with status OK"),
        ({"values": put((1, 1), -1.0)}, Unparseable, "the value -1.0 with status TOO_LONG"),
        ({"statuses": put((0, 0), 77)}, Unparseable, "`valid` and `statuses` contradict"),
        ({"statuses": put((1, 1), 77)}, Unparseable, "unknown status 77"),
        ({"token_counts": put((0, 0), -1)}, Unparseable, "a negative token count"),
        ({"texts": lambda texts: texts[::-1]}, Unparseable, "contradicts itself"),
        ({"texts": lambda texts: texts[:-1]}, Unparseable, "contradicts itself"),
        ({"values": lambda values: values.T}, BadInput, r"float32\[5, 3\] stands where f4\[3, 5\] should"),
        ({"values": lambda values: values.astype(np.float64)}, BadInput, "float64"),
        ({"revisions": lambda names: names[:2]}, BadInput, "the numbers should agree"),
        ({"models": put(0, "a\tb")}, BadInput, "cannot name a model"),
        ({"dtypes": put(0, "x y")}, BadInput, "'x y' is no dtype"),
        ({"space": lambda space: np.array(str(space).replace("log-like", "dislike"))}, Unsupported, "points of the"),
        ({"space": lambda space: np.array(str(space).replace("nats", "miles"))}, Unsupported, "points of the"),
        ({"space": lambda space: np.array(str(space)[:-9])}, Unparseable, "its heading cannot be read"),
        ({"transform": lambda _: np.array("[" * 50)}, Unparseable, "damaged"),
        ({"transform": lambda _: np.array("{}")}, Unparseable, "its heading cannot be read"),
        ({"details": put(0, "[]")}, Unparseable, "the details of 'Org/a' are no object"),
    ],
)
def test_an_edited_file_is_found_out(session, tmp_path, changes, error, message):
    fill(session)
    path = tmp_path / "v.npz"
    export_vectors(session, path, text_set="five")
    with pytest.raises(error, match=message):
        open_vectors([rewritten(path, **changes)])


def test_an_untouched_rewriting_still_reads(session, tmp_path):
    fill(session)
    export_vectors(session, tmp_path / "v.npz", text_set="five")
    assert import_vectors(session, open_vectors([rewritten(tmp_path / "v.npz")])[0]).added == 0


def test_one_model_twice_in_our_own_file(session, tmp_path):
    fill(session)
    path = tmp_path / "v.npz"
    export_vectors(session, path, text_set="five")
    same = dict.fromkeys(("models", "revisions", "identities", "files", "dtypes"), put(0, None))
    with np.load(path) as arrays:
        for name in same:
            same[name] = put(0, arrays[name][1])
    with pytest.raises(BadInput, match="'Org/b' is there twice"):
        open_vectors([rewritten(path, **same)])


def test_every_truncation_leaves_the_database_as_it_was(session, out):
    fill(session)
    export_vectors(session, out, text_set="five")
    whole, before = out.read_bytes(), stored(session)
    for end in range(1, len(whole), max(1, len(whole) // 60)):
        out.write_bytes(whole[:end])
        with pytest.raises(BadInput):
            import_vectors(session, open_vectors([out])[0])
    assert stored(session) == before


@pytest.mark.skipif(not SHARED.exists(), reason="the public bits-per-byte matrix is not here")
def test_a_real_matrix_in_bits_per_byte(session):
    keys = Keys(values="bpb", models="models", texts="doc_ids", unit="bits_per_byte")
    (file,) = open_vectors([SHARED], keys)
    for added in (89, 0):
        answer = import_vectors(session, file, source="perplexity-correlations", text_set="perplexity/documents")
        assert (answer.added, answer.unit, answer.opaque, answer.attached) == (added, "bits_per_byte", True, 0)
    named = models.find(session, "stabilityai/stablelm-2-1_6b")
    assert named.kind == "named"
    held = vectors.held_by(session, named.id)
    assert [(one.profile, one.unit) for one in held] == [("imported:perplexity-correlations", "bits_per_byte")]
