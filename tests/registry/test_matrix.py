"""The cached matrix: made anew whenever it may be wrong, and searched like the values themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from sqlalchemy import text

from registry import database, matrix
from registry.errors import Corrupt, Unavailable
from registry.matrix_search import approximate_distances, search
from registry.methods import log_likelihood as method
from registry.queries import textsets, transforms
from registry.queries.nearest import nearest
from registry.spaces import log_likelihood_space
from registry.textsets import Pair, freeze

N = 300


def handles(answer):
    return [item.b.handle for item in answer.items]


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


@pytest.mark.parametrize("damage", ["manifest", "folder", "short", "truncated", "gone", "zeroed", "flipped"])
def test_a_damaged_cache_is_made_anew(damage, session, family, home):
    whole = nearest(session, family["centre"], k=5)
    (folder,) = folders(home)
    (data,) = folder.glob("data-*")
    if damage == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "mem')
    elif damage == "folder":
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").mkdir()
    elif damage == "short":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["members"][0] = manifest["members"][0][:3]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    elif damage == "zeroed":
        with (data / "centered.f32").open("r+b") as file:
            file.write(bytes(4 * N * 2))
    elif damage == "truncated":
        with (data / "raw.f32").open("r+b") as file:
            file.truncate(100)
    elif damage == "gone":
        (data / "centered.f32").unlink()
    else:
        # As a failing disk does it: nothing but the values' own checksum tells.
        before = (data / "raw.f32").stat()
        with (data / "raw.f32").open("r+b") as file:
            file.seek(4 * N + 40)
            file.write(b"\x00\x00\x00\x00")
        os.utime(data / "raw.f32", ns=(before.st_atime_ns, before.st_mtime_ns))
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
    with pytest.raises(Corrupt, match="of org/m1@unknown, does not match its checksum"):
        nearest(session, family["centre"])


def test_processes_that_build_at_once_agree(fresh_database, modelkin_env, database_url, registry_on):
    with database.session() as opened:
        text_set = textsets.add(opened, "texts", freeze([Pair(f"Q{n}", f"A{n}") for n in range(N)]))
        registry = registry_on(text_set, opened)
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


def load(session, registry):
    space = log_likelihood_space(registry.text_set.content_hash, "chat", "nats")
    return matrix.load(session, registry.text_set, transforms.get(session, "base"), space)


def test_a_cache_of_another_format_is_made_anew(session, family, home):
    whole = nearest(session, family["centre"], k=5)
    (folder,) = folders(home)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    matrix._opened.clear()
    assert nearest(session, family["centre"], k=5).items == whole.items
    assert json.loads((folder / "manifest.json").read_text())["generation"] == manifest["generation"] + 1


def test_a_better_vector_of_an_old_model_takes_the_place_of_the_old_one(session, registry, family, home):
    nearest(session, family["centre"], k=1)
    registry.vector(family[16], family["values"], engine_version=2)
    first = nearest(session, family["centre"], k=1).items[0]
    assert (first.b.handle, first.value, first.details["engine_b"]) == ("org/m16", 0.0, 2)
    table = load(session, registry)
    assert len(table.model_ids) == 6


def test_two_databases_behind_one_home_have_a_folder_each(session, registry, family, home):
    load(session, registry)
    # The same text set in another database was added at another moment.
    session.execute(text("update text_sets set created_at = created_at - interval '1 second'"))
    session.expire_all()
    registry.text_set = textsets.get(session, "texts")
    load(session, registry)
    assert len(folders(home)) == 2


def test_writers_take_turns(session, registry, family, home, tmp_path):
    load(session, registry)
    (folder,) = folders(home)
    # Another process holds the lock: ours must wait until it lets go, not write beside it.
    code = (
        "import fcntl, sys, time\n"
        "lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(1); open(sys.argv[2], 'w').close()"
    )
    mark = tmp_path / "let-go"
    other = subprocess.Popen([sys.executable, "-c", code, folder / "lock", mark], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    registry.add("late", family["values"])
    assert len(load(session, registry).model_ids) == 7
    assert mark.exists()
    other.communicate(timeout=10)


def test_rows_outside_among_are_never_candidates(session, registry, family):
    # More models than are ranked again, and those that are admitted are the farthest.
    for number in range(100):
        registry.add(f"near{number}", family["values"] + 0.001 * number)
    far = [registry.add(f"far{number}", family["values"] * 1.5 + number).id for number in range(70)]
    table = load(session, registry)
    allowed = np.isin(table.model_ids, far)
    rows, _ = search(table, table.row_of(family["centre"].id), 70, allowed)
    assert sorted(table.model_ids[rows].tolist()) == sorted(far)
    rows, _ = search(table, table.row_of(family["centre"].id), 5, allowed)
    assert len(rows) == 5
    assert set(table.model_ids[rows].tolist()) <= set(far)


@pytest.mark.parametrize("gappy", [False, True])
def test_rows_without_two_common_texts_come_last(gappy, session, registry, family):
    for number in range(250 if gappy else 3):
        registry.add(f"m-{number}", family["values"] + 30 + number % 7, missing=[number % N])
    alone = registry.add("alone", family["values"], missing=range(1, N))
    answer = nearest(session, family["centre"], k=500)
    assert answer.items[-1].b.handle == "org/alone"
    assert (answer.items[-1].value, answer.items[-1].n) == (None, 1)
    assert "only 1 texts" in answer.items[-1].reason
    assert nearest(session, alone, k=1).items[0].value is None


def test_near_duplicates_survive_single_precision(session, registry):
    """Values 10⁵ times their differences: without the per-text offset the float32 product cannot order them."""
    generator = np.random.default_rng(11)
    centre = generator.normal(-590, 200, N)
    for number in range(300):
        registry.add(f"m{number}", centre + generator.normal(0, 0.01 * (1 + number), N))
    table = load(session, registry)
    squared, counts = method.masked_squared_distances(table.raw[0], table.valid(0), table.raw, table.valid(slice(None)))
    assert approximate_distances(table, 0)[1:] == pytest.approx((squared / counts)[1:], rel=1e-3)


@pytest.mark.parametrize("extreme", [-1e9, -1e30, -3.4e38])
@pytest.mark.parametrize("gappy", [False, True])
def test_extreme_values_spoil_no_other_row(extreme, gappy, session, registry):
    generator = np.random.default_rng(5)
    centre = generator.normal(-590, 200, N)
    raw, valid = np.empty((400, N), np.float32), np.ones((400, N), bool)
    for number in range(400):
        raw[number] = centre + generator.normal(0, 0.1 * (1 + number % 97), N)
        if number in (3, 17, 390):
            raw[number, 5 + number % 2] = extreme
        gaps = np.flatnonzero(generator.random(N) < 0.05) if gappy else []
        registry.add(f"m{number}", raw[number], missing=gaps)
        valid[number, gaps] = False
    table = load(session, registry)
    for at in (0, 1, 97, 3, 390):
        squared, counts = method.masked_squared_distances(raw[at], valid[at], raw, valid)
        exact = squared / counts
        exact[at] = np.inf
        nearest_ten = np.argsort(exact, kind="stable")[:10]
        rows, distances = search(table, at, 10)
        assert distances == pytest.approx(exact[nearest_ten], rel=1e-9)
        if at not in (3, 390):
            assert rows.tolist() == nearest_ten.tolist()


@pytest.mark.parametrize("place", ["folder", "vectors", "cache"])
def test_a_file_in_the_place_of_the_cache_is_one_clear_error(place, session, family, home):
    nearest(session, family["centre"])
    (folder,) = folders(home)
    path = {"folder": folder, "vectors": folder.parent, "cache": folder.parent.parent}[place]
    shutil.rmtree(path)
    path.write_text("")
    matrix._opened.clear()
    with pytest.raises(Unavailable, match="cannot be written"):
        nearest(session, family["centre"])


@pytest.mark.parametrize("times", [1, 1000])
def test_a_folder_removed_while_it_is_built(times, session, family, home, monkeypatch):
    whole = nearest(session, family["centre"])
    (folder,) = folders(home)
    replace, left = matrix._replace, [times]

    def lose_and_replace(path, content):
        if left[0]:
            left[0] -= 1
            shutil.rmtree(folder)
        replace(path, content)

    shutil.rmtree(folder)
    matrix._opened.clear()
    monkeypatch.setattr(matrix, "_replace", lose_and_replace)
    if times == 1:
        assert nearest(session, family["centre"]).items == whole.items
    else:
        with pytest.raises(Unavailable, match="being deleted"):
            nearest(session, family["centre"])
