"""Neighbours: against exact differences, with gaps, across spaces, and from a cache that may be damaged."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from sqlalchemy import text

from registry import database, matrix
from registry.errors import Ambiguous, BadInput, NotFound, SpaceMismatch
from registry.matrix_search import approximate_distances, search
from registry.methods import log_likelihood as method
from registry.queries import divergence, evidence, models, textsets, transforms, vectors
from registry.queries.nearest import nearest
from registry.queries.vectors import NewVector
from registry.settings import settings
from registry.spaces import log_likelihood_space
from registry.statuses import Status
from registry.textsets import Pair, freeze

N = 300


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own for the cache; the database stays the test's."""
    monkeypatch.setenv("MODELKIN_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def texts(session, home):
    return textsets.add(session, "texts", freeze([Pair(f"Question {n}?", f"Answer {n}.") for n in range(N)]))


class Registry:
    """Adds models with given values."""

    def __init__(self, session, text_set):
        self.session, self.text_set = session, text_set

    def add(self, name, values, **changes):
        model = models.register_named(self.session, f"org/{name}", "test")
        self.vector(model, values, **changes)
        return model

    def vector(self, model, values, *, missing=(), transform="base", **changes):
        statuses = np.zeros(len(values), np.uint8)
        statuses[list(missing)] = Status.TOO_LONG
        fields = {
            "model_id": model.id,
            "text_set_id": self.text_set.id,
            "transform_id": transforms.get(self.session, transform).id,
            "profile": "chat",
            "dtype": "float32",
            "engine_version": 1,
            "log_likelihoods": np.asarray(values, np.float32),
            "statuses": statuses,
            "token_counts": np.full(len(values), 5, np.int32),
            "path": "test",
        }
        vectors.insert_many(self.session, [NewVector(**fields | changes)])


@pytest.fixture
def registry(session, texts):
    return Registry(session, texts)


@pytest.fixture
def family(registry):
    """A centre and models at growing distance; values at the scale of real ones."""
    generator = np.random.default_rng(0)
    centre = generator.normal(-590, 200, N)
    found = {"centre": registry.add("centre", centre)}
    for step in (1, 2, 4, 8, 16):
        found[step] = registry.add(f"m{step}", centre + generator.normal(0, step, N))
    found["values"] = centre
    return found


def handles(answer):
    return [item.b.handle for item in answer.items]


def test_neighbours_by_distance_with_evidence(session, family):
    answer = nearest(session, family["centre"], k=3)
    assert handles(answer) == ["org/m1", "org/m2", "org/m4"]
    assert (answer.candidates, answer.text_set) == (5, "texts")
    first = answer.items[0]
    assert first.statistic == "kl_nats"
    assert first.value == pytest.approx(0.5, rel=0.3)
    assert first.interval.low < first.value < first.interval.high
    assert first.interval.kind == "fourth-moment"
    assert (first.n, first.closer, first.symmetric) == (N, "lower", True)
    assert json.loads(first.space)["profile"] == "chat"
    assert first.details["resolved_from_next"] is True
    assert first.details["clip"] == "none: no catalog"
    mean_bytes = np.mean([len(f"Answer {n}.") for n in range(N)])
    assert first.details["kl_bits_per_byte"] == pytest.approx(first.value / mean_bytes / np.log(2))
    json.dumps(first.to_dict(), allow_nan=False)


def test_paging_goes_on_where_it_stopped(session, registry, family):
    whole = nearest(session, family["centre"], k=5)
    assert whole.next is None
    first = nearest(session, family["centre"], k=2)
    rest = nearest(session, family["centre"], k=3, after=first.next)
    assert handles(rest) == handles(whole)[2:]
    assert [item.details["rank"] for item in rest.items] == [3, 4, 5]
    assert rest.next is None
    # A model that comes before the mark meanwhile shifts the ranks, and nothing is shown twice or left out.
    for number in range(4):
        registry.add(f"closer{number}", family["values"])
    rest = nearest(session, family["centre"], k=2, after=first.next)
    assert handles(rest) == handles(whole)[2:4]
    assert [item.details["rank"] for item in rest.items] == [7, 8]
    assert handles(nearest(session, family["centre"], k=2, after=rest.next)) == handles(whole)[4:]


def test_paging_through_equal_distances_shows_each_model_once(session, registry, family):
    for number in range(7):
        registry.add(f"twin{number}", family["values"])
    seen, mark = [], None
    while True:
        page = nearest(session, family["centre"], k=2, after=mark)
        seen += handles(page)
        mark = page.next
        if mark is None:
            break
    assert seen == handles(nearest(session, family["centre"], k=100))
    assert len(set(seen)) == 12


def test_among_and_bootstrap(session, family):
    answer = nearest(session, family["centre"], among=[family[8], family[2]], bootstrap=500)
    assert handles(answer) == ["org/m2", "org/m8"]
    assert answer.items[0].interval.kind == "bootstrap"


def test_missing_texts_are_left_out_pair_by_pair(session, registry, family):
    values = family["values"] + np.random.default_rng(1).normal(0, 0.5, N)
    values[:40] = np.nan
    closest = registry.add("gappy", values, missing=range(40))
    answer = nearest(session, family["centre"])
    assert answer.items[0].b.handle == "org/gappy"
    assert answer.items[0].n == N - 40
    assert answer.items[0].value == pytest.approx(0.125, rel=0.3)
    back = nearest(session, closest, k=1).items[0]
    assert back.value == pytest.approx(answer.items[0].value, rel=1e-12), "symmetric"


def test_an_exact_duplicate_and_a_near_one_are_told_apart(session, registry, family):
    registry.add("twin", family["values"])
    registry.add("shifted", family["values"] - 64)
    registry.add("almost", family["values"] + np.random.default_rng(2).normal(0, 1e-3, N))
    answer = nearest(session, family["centre"], k=3)
    assert set(handles(answer)[:2]) == {"org/twin", "org/shifted"}
    assert answer.items[0].value == 0.0
    assert answer.items[2].b.handle == "org/almost"
    stored = family["values"].astype(np.float32)
    almost = (family["values"] + np.random.default_rng(2).normal(0, 1e-3, N)).astype(np.float32)
    exact = np.var(stored.astype(float) - almost.astype(float)) / 2
    assert answer.items[2].value == pytest.approx(exact, rel=1e-9)


def test_ties_have_one_order(session, registry, family):
    for name in ("t2", "t1", "t3"):
        registry.add(name, family["values"])
    assert handles(nearest(session, family["centre"], k=3)) == ["org/t2", "org/t1", "org/t3"]


def test_below_the_noise_floor_the_value_is_null(session, registry, family):
    noisy = registry.add("noisy", family["values"] + np.random.default_rng(3).normal(0, 1, N), noise_floor_nats=2.0)
    items = {item.b.handle: item for item in nearest(session, noisy).items}
    assert items["org/centre"].value is None
    assert items["org/centre"].reason.startswith("unresolved")
    assert items["org/centre"].details["estimate"] == pytest.approx(0.5, rel=0.3)
    assert items["org/centre"].interval is None
    assert items["org/m16"].value > 2.0


def test_float32_comes_before_bfloat16_and_the_newest_engine_first(session, registry, family):
    model = registry.add("both", family["values"] + 1000 * np.arange(N), dtype="bfloat16", engine_version=9)
    registry.vector(model, family["values"] + 2000 * np.arange(N), dtype="float32", engine_version=1)
    registry.vector(model, family["values"], dtype="float32", engine_version=2)
    first = nearest(session, family["centre"], k=1).items[0]
    assert (first.b.handle, first.value) == ("org/both", 0.0)
    assert (first.details["dtype_b"], first.details["engine_b"]) == ("float32", 2)


def test_another_space_is_refused_with_both_keys(session, registry, family, texts):
    plain = registry.add("plain", family["values"], profile="plain")
    chat_key = log_likelihood_space(texts.content_hash, "chat", "nats").key
    plain_key = log_likelihood_space(texts.content_hash, "plain", "nats").key
    with pytest.raises(SpaceMismatch) as caught:
        nearest(session, family["centre"], among=[plain])
    assert chat_key in caught.value.message
    assert plain_key in caught.value.message
    with pytest.raises(SpaceMismatch, match="profile plain"):
        nearest(session, plain, profile="chat")
    assert handles(nearest(session, plain)) == [], "nobody else is in that space"


def test_another_text_set_is_refused_with_both_keys(session, family, texts):
    other = textsets.add(session, "others", freeze([Pair("a", "b"), Pair("c", "d")]))
    with pytest.raises(SpaceMismatch) as caught:
        nearest(session, family["centre"], text_set="others")
    assert other.content_hash in caught.value.message
    assert texts.content_hash in caught.value.message


def test_the_only_set_is_meant_and_several_must_be_chosen_from(session, registry, family):
    other = textsets.add(session, "second", freeze([Pair(f"p{n}", f"r{n}") for n in range(20)]))
    Registry(session, other).vector(family["centre"], np.arange(20))
    assert nearest(session, family[1], k=1).text_set == "texts"
    with pytest.raises(Ambiguous, match=r"second.*|texts.*"):
        nearest(session, family["centre"])
    assert nearest(session, family["centre"], text_set="texts", k=1).items


def test_what_was_not_scored_is_named_with_the_command(session, registry, family):
    bare = models.register_named(session, "org/bare", "test")
    with pytest.raises(NotFound) as caught:
        nearest(session, bare)
    assert "modelkin score" in caught.value.hint
    with pytest.raises(NotFound, match="only under base"):
        nearest(session, family["centre"], transform="cot")
    for wrong in ({"k": 0}, {"after": "3"}, {"after": "1_nan_2"}, {"bootstrap": -1}):
        with pytest.raises(BadInput):
            nearest(session, family["centre"], **wrong)


def test_an_opaque_set_or_bits_per_byte_give_no_kl(session, home):
    opaque = Registry(session, textsets.add_opaque(session, "ids", [f"id{n}" for n in range(30)]))
    values = np.random.default_rng(0).normal(-5, 1, 30)
    one, _ = opaque.add("o1", values, profile="imported:x"), opaque.add("o2", values + 0.1, profile="imported:x")
    item = nearest(session, one).items[0]
    assert (item.statistic, item.unit, item.interval) == ("relative_squared_distance", "1", None)
    assert item.value == pytest.approx(0, abs=1e-9)
    two = opaque.add("b1", values, unit="bits_per_byte", profile="imported:y")
    opaque.add("b2", -values, unit="bits_per_byte", profile="imported:y")
    assert nearest(session, two).items[0].value == pytest.approx(4, rel=1e-6)


def test_two_transforms_of_one_model_are_points_of_one_space(session, registry, family, texts):
    registry.vector(family["centre"], family["values"] + np.random.default_rng(1).normal(0, 3, N), transform="cot")
    space = log_likelihood_space(texts.content_hash, "chat", "nats")
    shift = divergence.compare_points(session, space, texts, (family["centre"], "base"), (family["centre"], "cot"))
    assert shift.value == pytest.approx(4.5, rel=0.3)
    assert shift.a.id == shift.b.id
    assert (shift.details["transform_a"], shift.details["transform_b"]) == ("base", "cot")


def test_a_resolved_name_brings_its_vectors(session, registry, family):
    name = registry.add("known-by-name", family["values"])
    target = models.register_named(session, "org/the-real-one", "test")
    # As `model resolve` does for a registered model.
    session.execute(text("update models set kind = 'folder' where id = :id"), {"id": target.id})
    session.execute(text("update models set resolved_to_id = :to where id = :id"), {"to": target.id, "id": name.id})
    assert nearest(session, family["centre"], k=1).items[0].b.handle == "org/the-real-one"


def test_evidence_is_stored_once(session, family):
    items = nearest(session, family["centre"], k=3).items
    assert evidence.record(session, items) == 3
    assert evidence.record(session, items) == 0
    stored = evidence.about(session, family["centre"].id, family[1].id)
    assert [(one.value, one.interval) for one in stored] == [(items[0].value, items[0].interval)]


# The cache -----------------------------------------------------------------------------------------------------------


def folders(home):
    return list((home / "cache" / "vectors").iterdir())


def test_new_vectors_are_appended_and_found(session, registry, family, home):
    nearest(session, family["centre"], k=1)
    (folder,) = folders(home)
    before = json.loads((folder / "manifest.json").read_text())
    registry.add("late", family["values"])
    assert handles(nearest(session, family["centre"], k=1)) == ["org/late"]
    after = json.loads((folder / "manifest.json").read_text())
    assert after["generation"] == before["generation"]
    assert len(after["members"]) == len(before["members"]) + 1


@pytest.mark.parametrize("damage", ["manifest", "truncated", "gone", "flipped"])
def test_a_damaged_cache_is_made_anew(damage, session, family, home):
    whole = nearest(session, family["centre"], k=5)
    (folder,) = folders(home)
    (data,) = folder.glob("data-*")
    if damage == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "mem')
    elif damage == "truncated":
        with (data / "raw.f32").open("r+b") as file:
            file.truncate(100)
    elif damage == "gone":
        (data / "centered.f32").unlink()
    else:
        with (data / "raw.f32").open("r+b") as file:
            file.seek(4 * N + 40)
            file.write(b"\x00\x00\x00\x00")
    matrix._opened.clear()
    assert nearest(session, family["centre"], k=5).items == whole.items


def test_rows_of_a_killed_writer_are_overwritten(session, registry, family, home):
    nearest(session, family["centre"], k=1)
    (folder,) = folders(home)
    (data,) = folder.glob("data-*")
    for name in ("raw.f32", "statuses.u1", "centered.f32", "norms.f64", "sums.f64", "gaps.i4", "gap_counts.i4"):
        with (data / name).open("ab") as file:
            file.write(b"half a row")
    matrix._opened.clear()
    registry.add("late", family["values"])
    assert handles(nearest(session, family["centre"], k=2)) == ["org/late", "org/m1"]


def test_damage_in_the_database_is_not_hidden(session, registry, family):
    session.execute(text("alter table vectors disable trigger all"))
    session.execute(
        text("update vectors set log_likelihoods = set_byte(log_likelihoods, 5, 1) where model_id = :id"),
        {"id": family[1].id},
    )
    with pytest.raises(vectors.Corrupt, match="of org/m1@unknown, does not match its checksum"):
        nearest(session, family["centre"])


def test_processes_that_build_at_once_agree(fresh_database, modelkin_env, database_url):
    with database.session() as session:
        text_set = textsets.add(session, "texts", freeze([Pair(f"Q{n}", f"A{n}") for n in range(N)]))
        registry = Registry(session, text_set)
        generator = np.random.default_rng(0)
        for n in range(30):
            registry.add(f"m{n}", generator.normal(-590, 200, N))
    ask = [sys.executable, "-c", "from api.cli import main; main()", "nearest", "org/m0", "--format", "json"]
    env = modelkin_env | {"DATABASE_URL": database_url}
    running = [subprocess.Popen(ask, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, answers
    assert len({out for out, _ in answers}) == 1


def at_random(share):
    return lambda generator, n, values: np.flatnonzero(generator.random(N) < share)


def the_long_ones(generator, n, values):
    """As where some models have a short context: the same texts, which carry most of every distance."""
    return np.argsort(values)[: (0, N // 20, N // 2)[n % 3]]


@pytest.mark.parametrize("gaps_of", [at_random(0.0), at_random(0.03), at_random(0.4), the_long_ones])
def test_search_equals_exact_differences(session, registry, gaps_of):
    generator = np.random.default_rng(7)
    lengths = generator.gamma(2.0, 0.5, N)
    centres = -590 * lengths + lengths * generator.normal(0, 60, (6, N))
    raw, valid = [], np.ones((500, N), bool)
    for n in range(500):
        values = (centres[n % 6] + lengths * generator.normal(0, 5 + n % 11, N)).astype(np.float32)
        gaps = gaps_of(generator, n, values)
        registry.add(f"m{n}", values, missing=gaps)
        raw.append(values)
        valid[n, gaps] = False
    space = log_likelihood_space(registry.text_set.content_hash, "chat", "nats")
    table = matrix.load(session, registry.text_set, transforms.get(session, "base"), space)
    for at in (0, 1, 2, 123):
        exact = np.full(500, np.inf)
        for row in set(range(500)) - {at}:
            common = valid[at] & valid[row]
            exact[row] = method.kl_nats(method.differences(raw[at], raw[row], common)).value
        rows, distances = search(table, at, 10)
        assert rows.tolist() == np.argsort(exact, kind="stable")[:10].tolist()
        assert distances / 2 == pytest.approx(exact[rows], rel=1e-9)
        near = approximate_distances(table, at) / 2
        assert near[exact < np.inf] == pytest.approx(exact[exact < np.inf], rel=1e-3)


def test_files_that_another_process_removes_meanwhile_are_made_anew(session, family, home, monkeypatch):
    whole = nearest(session, family["centre"], k=5)
    (folder,) = folders(home)
    read = matrix._manifest

    def read_and_lose(place):
        """The other process is quicker than the mapping, once."""
        monkeypatch.setattr(matrix, "_manifest", read)
        found = read(place)
        (folder / "manifest.json").unlink()
        for path in folder.glob("data-*/*"):
            path.unlink()
        return found

    matrix._opened.clear()
    monkeypatch.setattr(matrix, "_manifest", read_and_lose)
    assert nearest(session, family["centre"], k=5).items == whole.items
