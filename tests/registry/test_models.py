"""Models by identity and by name."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from registry import database
from registry.errors import Ambiguous, BadInput, Conflict, NotFound, Unsupported
from registry.identity import (
    Candidate,
    adapter_identity,
    content_identity,
    handle_from_name,
    hub_identity,
    named_identity,
    weights_hash,
)
from registry.queries import model_names, models
from registry.tables import Model


def hub(handle: str, commit: str = "a" * 40, file: str = "", **options: Any) -> Candidate:
    columns = options.pop("columns", {})
    facts = options.pop("facts", {})
    return Candidate(
        kind="hub",
        handle=handle,
        revision=commit,
        identity=hub_identity(handle, commit, file),
        source=handle,
        file=file,
        columns=columns,
        facts=facts,
        **options,
    )


def local(name: str, digest: str) -> Candidate:
    identity = content_identity("folder", {"model.safetensors": digest})
    return Candidate("folder", f"local/{name}", identity, identity, f"/models/{name}")


# --- identity ---------------------------------------------------------------------------------------------------


def test_identity_rules() -> None:
    assert hub_identity("Org/M", "A" * 40) == hub_identity("org/m", "a" * 40)
    assert hub_identity("org/m", "a" * 40) != hub_identity("org/m", "b" * 40)
    assert hub_identity("org/m", "a" * 40, "q4.gguf") != hub_identity("org/m", "a" * 40, "q8.gguf")
    files = {"config.json": "1", "model.safetensors": "2"}
    assert content_identity("folder", files) == content_identity("folder", dict(reversed(files.items())))
    assert content_identity("folder", files) != content_identity("folder", files | {"config.json": "3"})
    assert content_identity("gguf", {"a.gguf": "1"}) == content_identity("gguf", {"b.gguf": "1"})
    assert adapter_identity("base", "adapter") != adapter_identity("base2", "adapter")
    assert named_identity("Org/M") == named_identity("org/m") != named_identity("org/m", "step1")


def test_weights_hash_sees_a_re_upload_and_nothing_else() -> None:
    one = {"config.json": "c", "model-00001-of-00002.safetensors": "x", "model-00002-of-00002.safetensors": "y"}
    assert weights_hash(one) == weights_hash({"b.safetensors": "y", "a.safetensors": "x"})
    assert weights_hash(one) != weights_hash({"a.safetensors": "x"})
    assert weights_hash({"config.json": "c"}) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/m", ("org/m", "unknown")),
        ("gpt-4", ("local/gpt-4", "unknown")),
        (" My Model ", ("local/My-Model", "unknown")),
        ("org/m@step1000", ("org/m", "step1000")),
        ("a/b/c", ("a/b--c", "unknown")),
        ("meta-llama/Llama 2\t7b", ("meta-llama/Llama-2-7b", "unknown")),
    ],
)
def test_names_of_imports_become_handles(name: str, expected: tuple[str, str]) -> None:
    assert handle_from_name(name) == expected


@pytest.mark.parametrize("name", ["", "  ", "/", "@rev"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(BadInput):
        handle_from_name(name)


# --- register ---------------------------------------------------------------------------------------------------


def test_registering_twice_is_one_row(session: Session) -> None:
    first, created = models.register(
        session, hub("Org/M", columns={"downloads": 1, "likes": 1}, facts={"refs": ["main"]})
    )
    again, created_again = models.register(
        session, hub("org/m", columns={"downloads": 5, "architecture": "Other"}, facts={"refs": ["v1"]})
    )
    assert (created, created_again, first.id) == (True, False, again.id)
    assert again.handle == "Org/M"
    assert (again.downloads, again.likes, again.architecture) == (5, 1, None)
    assert again.facts["refs"] == ["main", "v1"]


def test_many_processes_register_the_same_model(fresh_database: Engine) -> None:
    found: list[tuple[int, bool]] = []
    gate = threading.Barrier(6)

    def work() -> None:
        gate.wait()
        with database.session(fresh_database) as session:
            model, created = models.register(session, hub("org/m"))
            found.append((model.id, created))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({model_id for model_id, _ in found}) == 1
    assert sum(created for _, created in found) == 1


def test_an_adapter_registers_its_base(session: Session) -> None:
    base = hub("org/base")
    adapter = Candidate("adapter", "me/lora", "b" * 40, adapter_identity(base.identity, "x"), "me/lora", base=base)
    model, _ = models.register(session, adapter)
    assert model.base_id == models.find(session, "org/base").id


def test_names_of_imports(session: Session) -> None:
    made = models.register_named_many(session, ["org/m", "GPT 4", "org/m@step1", "ORG/M"], "import of x.npz")
    assert made["org/m"].id == made["ORG/M"].id != made["org/m@step1"].id
    assert made["GPT 4"].handle == "local/GPT-4"
    assert models.register_named(session, "org/m", "another import").id == made["org/m"].id
    assert made["org/m"].source == "import of x.npz"
    with pytest.raises(Unsupported, match="only a name"):
        models.require_scorable(made["org/m"])


def test_a_name_is_never_taken_for_the_model_of_that_handle(session: Session) -> None:
    real, _ = models.register(session, hub("org/m"))
    named = models.register_named(session, "org/m", "import")
    assert named.id != real.id
    assert models.find(session, "org/m").id == real.id
    assert model_names.find_named(session, "Org/M").id == named.id


def test_a_name_is_found_by_what_is_unique_of_it(session: Session) -> None:
    one = models.register_named(session, "local/Llama-int4@" + "4" * 64, "import")
    assert model_names.find_named(session, "LOCAL/llama-int4").id == one.id
    assert model_names.find_named(session, "llama-int4@" + "4" * 12).id == one.id
    with pytest.raises(NotFound, match="of local/llama-int4 there is local/Llama-int4@4444"):
        model_names.find_named(session, "local/llama-int4@5")
    two = models.register_named(session, "local/llama-int4@" + "5" * 64, "import")
    assert model_names.find_named(session, "local/llama-int4@5").id == two.id
    with pytest.raises(Ambiguous, match=r"Llama-int4@4444.*, local/llama-int4@5555"):
        model_names.find_named(session, "local/llama-int4")
    step = models.register_named(session, "org/m@step1", "import")
    models.register_named(session, "org/m@step10", "import")
    assert model_names.find_named(session, "org/m@step1").id == step.id, "the whole name comes first"


def test_a_model_takes_the_names_that_are_proven_to_be_it(session: Session) -> None:
    real, adapter = local("tuned", "d"), hub("org/adapter", "c" * 40)
    other = hub("org/adapter", "c" * 40)
    adapter = dataclasses.replace(adapter, kind="adapter", identity=adapter_identity("x", "y"), base=hub("org/base"))
    names = ["local/old-name@" + "1" * 64, "org/adapter@" + "c" * 40, "local/tuned", "org/two@" + "2" * 64]
    named = models.register_named_many(
        session, names, "import", identities={names[0]: real.identity, names[3]: real.identity}
    )
    models.register_named_many(session, names[3:], "another", identities={names[3]: "another identity"})
    same_place = models.register_named(session, f"local/tuned@{real.revision}", "somebody")

    model, _ = models.register(session, real)
    claimed = model_names.claim_names(session, model, actor="ann")
    assert [each.id for each in claimed] == [named[names[0]].id, same_place.id]
    assert {each.resolved_to_id for each in claimed} == {model.id}
    assert [each.facts["resolutions"][0]["actor"] for each in claimed] == ["ann", "ann"]
    assert model_names.claim_names(session, model, actor="ann") == []
    assert [each.id for each in model_names.unresolved_twins(session, model)] == [named["local/tuned"].id]
    # Its revision is the adapter's alone: the name may be of another base.
    assert model_names.claim_names(session, models.register(session, adapter)[0], actor="ann") == []
    of_hub, _ = models.register(session, other)
    assert [each.id for each in model_names.claim_names(session, of_hub, actor="ann")] == [named[names[1]].id]


def test_same_weights(session: Session) -> None:
    one, _ = models.register(session, hub("org/m", weights_hash="w"))
    two, _ = models.register(session, hub("other/upload", weights_hash="w"))
    models.register(session, hub("org/else", weights_hash="v"))
    assert [other.id for other in models.same_weights(session, two)] == [one.id]


# --- find -------------------------------------------------------------------------------------------------------


def test_a_bare_handle_means_the_newest_revision(session: Session) -> None:
    models.register(session, hub("Org/M", "a" * 40))
    newest, _ = models.register(session, hub("Org/M", "abc" + "0" * 37))
    found = models.find(session, "org/m")
    assert (found.id, found.found_by, found.other_revisions) == (newest.id, "handle", 1)
    assert models.find(session, "ORG/M@ABC").id == newest.id
    assert models.find(session, "org/m", revision="abc").found_by == "revision"
    with pytest.raises(Ambiguous, match="several revisions"):
        models.find(session, "org/m@a")
    with pytest.raises(NotFound, match="not that revision"):
        models.find(session, "org/m@ffff")


def test_a_branch_by_which_it_was_registered(session: Session) -> None:
    one, _ = models.register(session, hub("org/m", "a" * 40, facts={"refs": ["step1000"]}))
    models.register(session, hub("org/m", "b" * 40, facts={"refs": ["main"]}))
    found = models.find(session, "org/m@step1000")
    assert (found.id, found.found_by) == (one.id, "ref")


def test_one_file_among_several(session: Session) -> None:
    four, _ = models.register(session, hub("org/m", file="m.Q4_0.gguf"))
    assert models.find(session, "org/m").id == four.id
    eight, _ = models.register(session, hub("org/m", file="m.Q8_0.gguf"))
    with pytest.raises(Ambiguous, match="several registered files"):
        models.find(session, "org/m")
    assert models.find(session, "org/m:m.q8_0.gguf").id == eight.id
    assert models.find(session, "org/m@aaaa:m.Q4_0.gguf").id == four.id
    # As an answer names it: `ModelRef`'s handle and its short revision.
    for model in (four, eight):
        assert models.find(session, str(models.model_ref(model))).id == model.id
        assert models.find(session, model.name).id == model.id


def test_a_bare_name_means_local_first_then_the_only_owner(session: Session) -> None:
    remote, _ = models.register(session, hub("org/tiny"))
    assert models.find(session, "Tiny").id == remote.id
    models.register(session, hub("other/tiny"))
    with pytest.raises(Ambiguous, match="org/tiny, other/tiny"):
        models.find(session, "tiny")
    mine, _ = models.register(session, local("tiny", "d"))
    assert models.find(session, "tiny").id == mine.id


def test_by_path(session: Session) -> None:
    model, _ = models.register(session, local("tiny", "d"))
    assert models.find(session, "/models/tiny").id == model.id
    moved = Candidate("folder", "local/tiny", model.revision, model.identity, "/elsewhere")
    models.register(session, moved)
    assert models.find(session, "/elsewhere").id == model.id


def test_near_names(session: Session) -> None:
    models.register(session, hub("HuggingFaceTB/SmolLM2-135M"))
    with pytest.raises(NotFound, match=r"did you mean HuggingFaceTB/SmolLM2-135M\?") as caught:
        models.find(session, "huggingfacetb/smollm2-135")
    assert "model add" in str(caught.value.hint)
    with pytest.raises(NotFound, match="SmolLM2-135M"):
        models.find(session, "smollm2-135")
    with pytest.raises(BadInput):
        models.find(session, " ")


# --- names ------------------------------------------------------------------------------------------------------


def test_aliases_move_and_every_move_is_written_down(session: Session) -> None:
    one, _ = models.register(session, hub("org/one"))
    two, _ = models.register(session, hub("org/two"))
    assert model_names.set_alias(session, "Best", one.id, actor="ann") is None
    assert models.find(session, "BEST").id == one.id
    assert models.find(session, "best").found_by == "alias"
    assert model_names.set_alias(session, "best", two.id, actor="bob") == one.id
    model_names.set_alias(session, "best", two.id, actor="bob")
    assert models.find(session, "best").id == two.id
    model_names.remove_alias(session, "best", actor="ann")
    with pytest.raises(NotFound):
        models.find(session, "best")
    history = model_names.alias_history(session, "best")
    assert [(event["from"], event["to"], event["actor"]) for event in history] == [
        (None, one.id, "ann"),
        (one.id, two.id, "bob"),
        (two.id, None, "ann"),
    ]


def test_an_alias_never_hides_a_handle(session: Session) -> None:
    models.register(session, hub("org/one"))
    two, _ = models.register(session, hub("org/two"))
    with pytest.raises(Conflict, match="handle of a registered model"):
        model_names.set_alias(session, "ORG/one", two.id, actor="ann")
    for bad in ("", "a b", "a/b/c", "-x", "a@b", "a:b"):
        with pytest.raises(BadInput):
            model_names.set_alias(session, bad, two.id, actor="ann")


def test_the_old_id_of_a_renamed_repo(session: Session) -> None:
    new, _ = models.register(session, hub("NewOrg/M", aliases=(("org/m", "renamed"),)))
    assert models.find(session, "Org/M").id == new.id
    newer, _ = models.register(session, hub("NewOrg/M", "b" * 40, aliases=(("org/m", "renamed"),)))
    assert models.find(session, "org/m").id == newer.id
    # A commit of the old name is a commit of the new.
    assert models.find(session, "org/m@aaaa").id == new.id
    # Somebody else takes the old id: from then on it means their repo.
    other, _ = models.register(session, hub("org/m", "c" * 40))
    assert models.find(session, "org/m").id == other.id


def test_tags(session: Session) -> None:
    model, _ = models.register(session, hub("org/m"))
    assert model_names.add_tags(session, model.id, ["Chat", "small", "chat"]) == ["chat", "small"]
    assert [each.id for each in models.list_models(session, tag="CHAT").items] == [model.id]
    assert model_names.tags_of_many(session, [model.id]) == {model.id: ["chat", "small"]}
    assert model_names.remove_tags(session, model.id, ["chat"]) == ["small"]


def test_resolving_a_name(session: Session) -> None:
    named = models.register_named(session, "llama-2", "leaderboard")
    real, _ = models.register(session, hub("meta/llama-2"))
    with pytest.raises(BadInput, match="not a name"):
        model_names.resolve(session, real, real, actor="ann")
    with pytest.raises(BadInput, match="only a name too"):
        model_names.resolve(session, named, models.register_named(session, "other", "x"), actor="ann")
    done = model_names.resolve(session, named, real, actor="ann")
    assert (done.id, done.kind, done.source, done.resolved_to_id) == (named.id, "named", "leaderboard", real.id)
    found = models.find(session, "local/llama-2")
    assert (found.id, found.found_by, found.resolved_from_id) == (real.id, "resolved", named.id)
    assert models.find(session, "local/llama-2", follow=False).id == named.id
    assert [each.id for each in model_names.names_resolved_to(session, real.id)] == [named.id]
    model_names.resolve(session, named, real, actor="ann")
    other, _ = models.register(session, hub("meta/llama-2", "b" * 40))
    with pytest.raises(Conflict, match="resolved to"):
        model_names.resolve(session, named, other, actor="bob")
    moved = model_names.resolve(session, named, other, actor="bob", move=True)
    assert [(each["from"], each["to"], each["actor"]) for each in moved.facts["resolutions"]] == [
        (None, real.id, "ann"),
        (real.id, other.id, "bob"),
    ]


# --- list -------------------------------------------------------------------------------------------------------


def test_filters(session: Session) -> None:
    small = {"architecture": "LlamaForCausalLM", "model_type": "llama", "parameters": 10, "licence": "MIT"}
    large = {"architecture": "GPT2LMHeadModel", "model_type": "gpt2", "parameters": 1000, "base_model": "org/a, Org/B"}
    one, _ = models.register(session, hub("org/small_one", columns=small))
    two, _ = models.register(session, hub("org/large", columns=large))
    named = models.register_named(session, "smallXone", "x")
    model_names.set_alias(session, "champion", two.id, actor="ann")
    models.mark_unstable(session, two.id, "NaN")

    def ids(**filters: Any) -> list[int]:
        return [model.id for model in models.list_models(session, **filters).items]

    assert ids() == [named.id, two.id, one.id]
    assert ids(architecture="llamaforcausallm") == ids(architecture="llama") == [one.id]
    assert ids(min_parameters=11) == [two.id]
    assert ids(max_parameters=999) == [one.id]
    assert ids(licence="mit") == [one.id]
    assert ids(base_model="org/b") == [two.id]
    assert ids(status="unstable") == [two.id]
    assert ids(kind="named") == [named.id]
    assert ids(search="small_") == [one.id]
    assert ids(search="champ") == [two.id]
    assert ids(has_vectors_for=1) == []


def test_pages_neither_repeat_nor_skip_while_others_register(session: Session) -> None:
    for number in range(25):
        models.register(session, hub(f"org/m{number}"))
    seen: list[str] = []
    after: str | None = None
    for step in range(10):
        page = models.list_models(session, limit=10, after=after)
        seen += [model.handle for model in page.items]
        models.register(session, hub(f"org/late{step}"))
        after = page.next
        if after is None:
            break
    assert seen == [f"org/m{number}" for number in reversed(range(25))]
    for bad in ("x", "-1", "1; drop table models"):
        with pytest.raises(BadInput):
            models.list_models(session, after=bad)
    with pytest.raises(BadInput):
        models.list_models(session, limit=0)


def test_thousands_of_names_at_once(session: Session) -> None:
    made = models.register_named_many(session, [f"org/m{number}" for number in range(3000)], "x")
    assert len(made) == 3000
    assert session.scalar(select(func.count()).select_from(Model)) == 3000
