"""Neighbours: against exact differences, with gaps, across spaces, and from a cache that may be damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sqlalchemy import text

from registry.errors import Ambiguous, BadInput, NotFound, SpaceMismatch
from registry.identity import Candidate, hub_identity
from registry.methods import log_likelihood as method
from registry.queries import divergence, evidence, models, textsets
from registry.queries.nearest import nearest
from registry.spaces import log_likelihood_space
from registry.textsets import Pair, freeze

N = 300


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


def test_the_only_set_is_meant_and_several_must_be_chosen_from(session, registry_on, family):
    other = textsets.add(session, "second", freeze([Pair(f"p{n}", f"r{n}") for n in range(20)]))
    registry_on(other).vector(family["centre"], np.arange(20))
    assert nearest(session, family[1], k=1).text_set == "texts"
    with pytest.raises(Ambiguous, match=r"second.*|texts.*"):
        nearest(session, family["centre"])
    assert nearest(session, family["centre"], text_set="texts", k=1).items


def test_what_was_not_scored_is_named_with_the_command(session, registry, family):
    bare = models.register_named(session, "org/bare", "test")
    with pytest.raises(NotFound) as caught:
        nearest(session, bare)
    assert caught.value.hint == "modelkin model resolve org/bare org/repo@commit", "a name has nothing to score"
    with pytest.raises(NotFound, match="only under base"):
        nearest(session, family["centre"], transform="cot")
    for wrong in ({"k": 0}, {"after": "3"}, {"after": "1_nan_2"}, {"bootstrap": -1}):
        with pytest.raises(BadInput):
            nearest(session, family["centre"], **wrong)


def real(session, name, template="t" * 64):
    identity = hub_identity(f"org/{name}", "a" * 40)
    columns = {"template_hash": template}
    return models.register(session, Candidate("hub", f"org/{name}", "a" * 40, identity, name, columns=columns))[0]


def hint_of(session, *words, **options):
    with pytest.raises((NotFound, SpaceMismatch)) as caught:
        nearest(session, *words, **options)
    return caught.value.hint


def test_a_hint_is_a_command_that_works(session, registry, family):
    """Without a template only plain can be scored, and nothing is scored on a set that the hint leaves out."""
    chat, plain = real(session, "chat"), real(session, "no-template", None)
    assert hint_of(session, chat) == "modelkin score org/chat"
    assert hint_of(session, plain) == "modelkin score org/no-template --profile plain"
    among = hint_of(session, family["centre"], among=[chat])
    assert among == "modelkin score org/chat --text-set texts"
    assert "modelkin score" not in hint_of(session, family["centre"], among=[plain])
    registry.vector(plain, family["values"], profile="plain")
    registry.vector(chat, family["values"], transform="cot")
    textsets.add(session, "more", freeze([Pair("p", "r")]))
    command = "modelkin score org/no-template --text-set"
    assert hint_of(session, plain, text_set="more").startswith(f"{command} more --profile plain, or")
    missing = hint_of(session, plain, transform="cot")
    assert missing.startswith(f"{command} texts --transforms cot --profile plain, or")
    assert hint_of(session, plain, profile="chat") == "ask within a space that it is in"
    assert hint_of(session, chat, profile="imported:lab") == "ask within a space that it is in"
    among = hint_of(session, family["centre"], among=[chat])
    assert among.startswith("modelkin score org/chat --text-set texts, or")
    textsets.add_opaque(session, "ids", ["a", "b"])
    assert hint_of(session, chat, text_set="ids") == "ask within a space that it is in"


def test_an_import_of_the_same_name_is_pointed_to(session, registry, family):
    registry.add("twin", family["values"])
    twin = real(session, "twin")
    assert f"modelkin model resolve org/twin {twin.name}; else modelkin score org/twin" in hint_of(session, twin)


def test_an_opaque_set_or_bits_per_byte_give_no_kl(session, home, registry_on):
    opaque = registry_on(textsets.add_opaque(session, "ids", [f"id{n}" for n in range(30)]))
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


def test_a_model_is_not_its_own_neighbour_even_when_named(session, family):
    answer = nearest(session, family["centre"], among=[family["centre"], family[2]])
    assert (handles(answer), answer.candidates) == (["org/m2"], 1)


def test_the_larger_of_two_noise_floors_counts(session, registry, family):
    loud = registry.add("loud", family["values"] + np.random.default_rng(3).normal(0, 1, N), noise_floor_nats=2.0)
    quiet = registry.add("quiet", family["values"], noise_floor_nats=1e-6)
    for asked, other in ((loud, quiet), (quiet, loud)):
        item = nearest(session, asked, among=[other]).items[0]
        assert (item.value, item.details["noise_floor_nats"]) == (None, 2.0)


def test_bits_per_byte_count_the_texts_valid_in_both(session, registry, family):
    long_ones = [n for n in range(N) if n >= 100]
    registry.add("short", family["values"] + np.arange(N), missing=long_ones)
    item = nearest(session, family["centre"], k=500).items[-1]
    assert item.b.handle == "org/short"
    mean_bytes = np.mean([len(f"Answer {n}.") for n in range(100)])
    assert item.details["mean_response_bytes"] == pytest.approx(mean_bytes)
    assert item.details["kl_bits_per_byte"] == pytest.approx(item.value / mean_bytes / np.log(2))


def test_different_templates_and_numerics_are_said(session, registry, family):
    one = registry.add("one", family["values"], template_hash="aa", dtype="bfloat16")
    two = registry.add("two", family["values"], template_hash="bb")
    details = nearest(session, one, among=[two]).items[0].details
    assert (details["templates_differ"], details["dtype_a"], details["dtype_b"]) == (True, "bfloat16", "float32")
    three = registry.add("three", family["values"], template_hash="bb")
    assert nearest(session, two, among=[three]).items[0].details["templates_differ"] is False


def test_equal_inputs_have_one_hash_and_another_question_another(session, family):
    def hashes(**asked):
        return [item.inputs_hash for item in nearest(session, family["centre"], k=2, **asked).items]

    plain = hashes()
    assert plain == hashes(seed=5), "without a bootstrap the seed plays no part"
    assert len(set(plain)) == 2
    assert len({hashes(bootstrap=draws, seed=seed)[0] for draws in (20, 30) for seed in (0, 1)}) == 4


def test_its_own_vector_comes_before_one_imported_under_a_name(session, registry, family):
    target = registry.add("real", family["values"])
    session.execute(text("update models set kind = 'folder' where id = :id"), {"id": target.id})
    name = registry.add("a-name", family["values"] + 1000 * np.arange(N), engine_version=9)
    session.execute(text("update models set resolved_to_id = :to where id = :id"), {"to": target.id, "id": name.id})
    first = nearest(session, family["centre"], k=1).items[0]
    assert (first.b.handle, first.value, first.details["engine_b"]) == ("org/real", 0.0, 1)


def test_of_two_units_on_one_set_nats_are_meant(session, registry, family):
    # Stored first, and the alphabetically first unit.
    registry.vector(family["centre"], np.arange(N), unit="bits_per_byte", dtype="unknown", engine_version=0)
    assert nearest(session, family["centre"], k=1).items[0].statistic == "kl_nats"


@pytest.mark.parametrize("wild", [-1e9, -1e30, -3.4e38])
@pytest.mark.parametrize("first", [True, False])
def test_one_wild_value_hides_nobodys_neighbours(session, registry, wild, first):
    generator = np.random.default_rng(11)
    centre = generator.normal(-590, 200, N)
    values = centre + generator.normal(0, 1, (150, N)) * (1 + np.arange(150) % 13)[:, None]
    values[0 if first else 120, 7] = wild
    stored = values.astype(np.float32)
    rows = [registry.add("m0", stored[0])]
    # The cache is begun with the first model alone, be it the wild one.
    assert handles(nearest(session, rows[0])) == []
    rows += [registry.add(f"m{n}", stored[n]) for n in range(1, len(stored))]
    # Seen from the wild one itself, beyond 1e9 all others are equally far in float64 too.
    for at in (5, 0 if first else 120) if wild > -1e10 else (5,):
        exact = [method.kl_nats(method.differences(stored[at], other, np.ones(N, bool))).value for other in stored]
        expected = [n for n in np.argsort(exact, kind="stable") if n != at][:10]
        assert handles(nearest(session, rows[at])) == [f"org/m{n}" for n in expected]


def test_a_negative_seed_is_refused(session, family):
    with pytest.raises(BadInput, match="seed"):
        nearest(session, family["centre"], bootstrap=10, seed=-1)
