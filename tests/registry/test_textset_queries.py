from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError

from registry import database
from registry.errors import Ambiguous, BadInput, Conflict, NotFound, Unsupported
from registry.queries import textsets
from registry.tables import Text, TextSet, TextSetName
from registry.textsets import Pair, freeze

AWKWARD = "tab\t, backslash \\, \\N, newline\n, quote \" ', ü 日本 \u2028"


def some(n=3, prefix="p"):
    return freeze([Pair(f"{prefix}{i}", "y", tags={"language": "de"}) for i in range(n)])


def test_texts_come_back_byte_for_byte(session):
    pair = Pair(AWKWARD, f"{AWKWARD}.", "id-1", {"a": [1, {"b": AWKWARD}]}, {"language": "de"})
    frozen = freeze([pair, Pair("x", "y")])
    info = textsets.add(session, "awkward", frozen, source={"file": "a.jsonl"})
    stored = textsets.texts(session, info.id)
    assert (stored[0].prompt, stored[0].response) == (pair.prompt, pair.response)
    assert stored[0].response_bytes == len(pair.response.encode())
    assert (stored[0].columns, stored[0].tags, stored[0].source_id) == (pair.columns, pair.tags, "id-1")
    assert [text.text_hash for text in stored] == list(frozen.text_hashes)
    assert [text.position for text in textsets.texts(session, info.id, 1, 2)] == [1]
    assert textsets.response_bytes(session, info.id) == len(pair.response.encode()) + 1
    assert info.source["file"] == "a.jsonl"
    assert info.source["report"]["kept"] == 2


def test_prompts_keep_their_ids(session):
    info = textsets.add(session, "m", freeze([Pair("a", "1"), Pair("b", "1"), Pair("a", "2")]))
    assert (info.n_texts, info.n_prompts) == (3, 2)
    assert [text.prompt_id for text in textsets.texts(session, info.id)] == [0, 1, 0]


def test_a_second_name_is_an_alias(session):
    first = textsets.add(session, "one", some())
    second = textsets.add(session, "two", some())
    assert (second.id, second.name) == (first.id, "two")
    assert set(textsets.get(session, "one").names) == {"one", "two"}
    assert session.scalar(select(func.count()).select_from(Text)) == 3


def test_adding_again_changes_nothing(session):
    assert textsets.add(session, "one", some()) == textsets.add(session, "one", some())


def test_a_name_is_never_rebound(session):
    textsets.add(session, "one", some(3))
    with pytest.raises(Conflict, match="'one' is taken"):
        textsets.add(session, "one", some(4))
    # The refused content left nothing behind.
    assert session.scalar(select(func.count()).select_from(TextSet)) == 1


def test_found_by_hash_and_by_its_beginning(session):
    info = textsets.add(session, "one", some())
    assert textsets.get(session, info.content_hash).id == info.id
    assert textsets.get(session, info.content_hash[:8]).name == "one"
    with pytest.raises(NotFound):
        textsets.get(session, info.content_hash[:7])


def test_a_beginning_that_fits_two_is_ambiguous(session):
    for tail in "ab":
        session.add(TextSet(content_hash="12345678" + tail, n_texts=1, n_prompts=1))
    session.flush()
    with pytest.raises(Ambiguous):
        textsets.get(session, "12345678")


def test_unknown_names_get_a_hint(session):
    textsets.add(session, "tulu3", some())
    with pytest.raises(NotFound, match="there are tulu3") as caught:
        textsets.get(session, "tulu4")
    assert caught.value.hint == "did you mean 'tulu3'?"


def test_list(session):
    textsets.add(session, "one", some(3))
    textsets.add(session, "two", some(4))
    textsets.add(session, "three", some(3))
    assert [(info.name, info.n_texts) for info in textsets.list_all(session)] == [("one", 3), ("two", 4)]


def test_the_database_itself_refuses_double_texts_and_half_pairs(session):
    info = textsets.add(session, "one", some(1))
    digest = textsets.texts(session, info.id)[0].text_hash
    for row in (
        {"position": 1, "text_hash": digest, "prompt": "x", "response": "y"},
        {"position": 1, "text_hash": b"0" * 32, "prompt": "x"},
    ):
        with session.begin_nested() as savepoint:
            session.add(Text(text_set_id=info.id, prompt_id=0, **row))
            with pytest.raises(IntegrityError):
                session.flush()
            savepoint.rollback()


def test_opaque_sets_have_ids_and_no_text(session):
    info = textsets.add_opaque(session, "pile", ["doc-1", "doc-2"])
    assert info.opaque
    stored = textsets.texts(session, info.id)
    assert [(text.source_id, text.prompt, text.response_bytes) for text in stored] == [
        ("doc-1", None, None),
        ("doc-2", None, None),
    ]
    assert textsets.response_bytes(session, info.id) is None
    assert textsets.add_opaque(session, "again", ["doc-1", "doc-2"]).id == info.id
    assert textsets.add_opaque(session, "other", ["doc-2", "doc-1"]).id != info.id


def test_what_needs_text_says_so(session):
    opaque = textsets.add_opaque(session, "pile", ["doc-1"])
    with pytest.raises(Unsupported, match="scoring needs text, but the text set 'pile' is opaque"):
        textsets.require_text(opaque, "scoring")
    with pytest.raises(Unsupported, match="shuffling prompts needs text"):
        textsets.derive_shuffled(session, "pile", 1)
    assert textsets.require_text(textsets.add(session, "one", some())).name == "one"


def test_derived_sets(session):
    parent = textsets.add(session, "one", some(20))
    infos = textsets.derive_shuffled(session, "one", 10, seed=0)
    assert [info.name for info in infos] == [f"one/shuffle-{i}" for i in range(10)]
    assert len({info.content_hash for info in infos}) == 10
    assert {info.parent_id for info in infos} == {parent.id}
    assert infos[3].derivation == {"shuffle_prompts": 3, "seed": 0}
    assert [info.id for info in textsets.derived(session, parent.id)] == [info.id for info in infos]
    before = textsets.texts(session, parent.id)
    after = textsets.texts(session, infos[0].id)
    assert [text.response for text in after] == [text.response for text in before]
    assert [text.tags for text in after] == [text.tags for text in before]
    assert all(a.prompt != b.prompt for a, b in zip(after, before, strict=True))
    assert sorted(text.prompt or "" for text in after) == sorted(text.prompt or "" for text in before)


def test_deriving_again_changes_nothing_and_another_seed_is_another_name(session):
    textsets.add(session, "one", some(20))
    first = textsets.derive_shuffled(session, "one", 2)
    assert textsets.derive_shuffled(session, "one", 2) == first
    assert [info.name for info in textsets.derive_shuffled(session, "one", 1, seed=7)] == ["one/shuffle-seed7-0"]


def test_derived_sets_keep_whitespace_that_was_kept(session):
    rows = [Pair(f"p{i}", f" y{i}\n") for i in range(4)]
    textsets.add(session, "one", freeze(rows, keep_whitespace=True))
    (info,) = textsets.derive_shuffled(session, "one", 1)
    assert [text.response for text in textsets.texts(session, info.id)] == [row.response for row in rows]


@pytest.mark.parametrize("c", [0, 101])
def test_shuffles_are_counted(session, c):
    textsets.add(session, "one", some())
    with pytest.raises(BadInput):
        textsets.derive_shuffled(session, "one", c)


def test_starter_is_there_without_being_added(session):
    info = textsets.get(session, "starter")
    assert info.n_texts >= 300
    assert info.source["report"]["refused"] == {}
    assert info.source["report"]["altered"] == {}
    assert textsets.ensure_starter(session).id == info.id


ADD = """
import sys
from registry import database
from registry.queries import textsets
from registry.textsets import Pair, freeze

with database.session() as session:
    sys.stdin.readline()
    textsets.add(session, sys.argv[1], freeze([Pair(f"p{i}", "y") for i in range(int(sys.argv[2]))]))
"""


def add_at_once(environment, *arguments):
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(ADD), *map(str, given)],
            env=environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for given in arguments
    ]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [(process.communicate()[1], process.returncode) for process in running]


def test_two_processes_that_add_the_same_content_make_one_set(fresh_database, modelkin_env):
    outcomes = add_at_once(modelkin_env, ("a", 3000), ("b", 3000), ("a", 3000))
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    with database.session() as session:
        assert session.scalar(select(func.count()).select_from(TextSet)) == 1
        assert session.scalar(select(func.count()).select_from(Text)) == 3000
        assert set(session.scalars(select(TextSetName.name))) == {"a", "b"}


@pytest.mark.parametrize(("n", "outcome"), [(3, "one set"), (4, "Conflict")])
def test_an_add_waits_for_one_that_is_not_yet_committed(fresh_database, n, outcome):
    def second():
        with database.session() as session:
            return textsets.add(session, "a", some(n)).id

    with ThreadPoolExecutor(1) as other:
        with database.session() as session:
            first = textsets.add(session, "a", some(3)).id
            waiting = other.submit(second)
            wait_until_blocked(fresh_database)
        if outcome == "Conflict":
            with pytest.raises(Conflict, match="'a' is taken"):
                waiting.result()
        else:
            assert waiting.result() == first
    with database.session() as session:
        assert session.scalar(select(func.count()).select_from(TextSet)) == 1
        assert session.scalar(select(func.count()).select_from(Text)) == 3


def wait_until_blocked(engine):
    """Until some session of this database waits for a lock."""
    blocked = text(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    for _ in range(600):
        with engine.connect() as connection:
            if connection.scalar(blocked):
                return
        time.sleep(0.05)
    raise AssertionError("nobody waited")


def test_an_add_that_fails_half_way_leaves_nothing(fresh_database):
    broken = freeze([Pair("x", "y"), Pair("a", "b")])
    object.__setattr__(broken, "text_hashes", (broken.text_hashes[0],) * 2)
    with pytest.raises(Exception, match="duplicate key"), database.session() as session:
        textsets.add(session, "one", broken)
    with database.session() as session:
        assert session.scalar(select(func.count()).select_from(TextSet)) == 0
        assert session.scalar(select(func.count()).select_from(Text)) == 0


def test_the_name_of_the_bundled_set_is_kept_for_it(session):
    with pytest.raises(Conflict, match="bundled"):
        textsets.add(session, "starter", freeze([Pair("a", "b")]))
    with pytest.raises(Conflict, match="bundled"):
        textsets.add_opaque(session, "starter", ["a", "b"])
    assert textsets.get(session, "starter").n_texts > 300
