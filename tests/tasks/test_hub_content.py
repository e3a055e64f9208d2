"""Content that is not what was registered, and Hubs that are not to be trusted."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.errors import HubUnavailable, Refused
from registry.settings import settings
from tasks import hub_checks, loading, registration
from tests.fake_hub import FakeHub, cached_blob, files_of, flipped

Stored = Callable[[Any], Any]
WEIGHTS = "model.safetensors"


def test_weights_that_were_damaged_on_the_way_are_never_scored(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored
) -> None:
    """F08: of the right size, so that only their SHA-256 shows it; fetched twice, then refused."""
    files = files_of(tiny_llama)
    repo = fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    repo.served[WEIGHTS] = flipped(files[WEIGHTS])
    with pytest.raises(HubUnavailable, match=r"model\.safetensors of org/m@.* has not the content"):
        loading.load(known)
    assert fake_hub.sent.count(WEIGHTS) == 2
    # They lie in the cache with the right name and size, and are still not taken.
    with pytest.raises(HubUnavailable, match="has not the content"):
        loading.load(known)
    repo.served.clear()
    loading.load(known)
    assert cached_blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


def test_a_bad_disk_is_healed_by_the_hub_or_said(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F08, F04, F06: a bit flipped in the cache, met while the Hub limits us, while offline, and when it answers."""
    from huggingface_hub import constants

    files = files_of(tiny_llama)
    fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    cached_blob(WEIGHTS, "org/m", known.revision).write_bytes(flipped(files[WEIGHTS]))
    fake_hub.always = (429, {"Retry-After": "0"})
    with pytest.raises(HubUnavailable, match="limits our requests"):
        loading.load(known)
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubUnavailable, match="damaged in the Hub cache"):
            loading.load(known)
    fake_hub.always = None
    fake_hub.repos["org/m"].files_refused = (403, "GatedRepo")
    with pytest.raises(Refused) as caught:
        loading.load(known)
    assert caught.value.reason == "gated"
    fake_hub.repos["org/m"].files_refused = None
    loading.load(known)
    assert cached_blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


def test_weights_are_hashed_once(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load looks at the stamp only; a home that cannot be written costs the hash each time."""
    hashed: list[str] = []
    real = hub_checks.hashlib.file_digest

    def counted(stream: Any, name: str) -> Any:
        hashed.append(stream.name)
        return real(stream, name)

    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    monkeypatch.setattr(hub_checks.hashlib, "file_digest", counted)
    for _ in range(3):
        loading.load(known)
    assert len(hashed) == 1
    notes = settings().home / "cache" / "verified"
    (notes / f"{known.facts['files'][WEIGHTS]['sha256']}.json").write_text("[not json")
    loading.load(known)
    assert len(hashed) == 2
    os.utime(cached_blob(WEIGHTS, "org/m", known.revision))
    loading.load(known)
    assert len(hashed) == 3


def test_whoever_has_the_old_file_open_keeps_it(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F09: a damaged file is replaced, never deleted or rewritten under a process that has it mapped."""
    files = files_of(tiny_llama)
    fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    place = cached_blob(WEIGHTS, "org/m", known.revision)
    place.write_bytes(flipped(files[WEIGHTS]))
    with place.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        loading.load(known)
        assert bytes(mapped) == flipped(files[WEIGHTS])
    assert place.read_bytes() == files[WEIGHTS]


def test_other_repos_in_the_cache_are_left_alone(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F09: modelkin deletes nothing in the cache; blobs may be shared."""
    fake_hub.add("org/m", files_of(tiny_llama))
    fake_hub.add("org/other", files_of(tiny_llama))
    cache = Path(os.environ["HF_HUB_CACHE"])
    other = stored(registration.candidate("org/other"))
    loading.load(other)
    before = {path: path.stat().st_ino for path in cache.rglob("*") if path.is_file()}
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    cached_blob(WEIGHTS, "org/m", known.revision).write_bytes(b"")
    loading.load(known)
    assert {path: path.stat().st_ino for path in before} == before


def test_what_the_hub_states_later_does_not_replace_what_was_registered(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored
) -> None:
    """F02: other bytes of the same size under the same commit, with a matching etag, are not the registered model."""
    files = files_of(tiny_llama)
    repo = fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    repo.commits[known.revision][WEIGHTS] = flipped(files[WEIGHTS])
    with pytest.raises(HubUnavailable, match="has not the content"):
        loading.load(known)


# Trust


def test_the_token_stays_with_the_hub(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files come from another host, which is not told it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake_hub.add("org/m", files_of(tiny_llama))
    loading.load(stored(registration.candidate("org/m")))
    assert {host for host, _ in fake_hub.tokens} == {"127.0.0.1"}
    assert WEIGHTS in fake_hub.sent


HOSTILE = [
    "../../../escaped.json",
    "/tmp/escaped.json",
    "a/../../escaped.jinja",
    "additional_chat_templates/../../escaped.jinja",
    "additional_chat_templates//escaped.jinja",
    "tokenizer\x00.json",
    "tokenizer\x1b[2J.json",
    "tokenizer\n.json",
    "tokenizer\\..\\..\\escaped.json",
    "tokenizer" + "x" * 300,
    "tokenizer/" * 200 + "x.jinja",
    "tokenizer\u202e.json",
    "..",
    "",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_name_cannot_leave_its_folder(fake_hub: FakeHub, tiny_llama: Path, stored: Stored, name: str) -> None:
    """Nor reach a terminal: such a file is passed over, the model is not."""
    files = files_of(tiny_llama)
    fake_hub.add("org/m", files | {name: b"{}"})
    known = stored(registration.candidate("org/m"))
    assert name not in known.facts["load"]
    loading.load(known)
    assert set(fake_hub.sent) <= set(files)


def test_an_index_cannot_name_a_file_elsewhere(fake_hub: FakeHub, tiny_llama: Path) -> None:
    files = files_of(tiny_llama)
    shard = "../../evil.safetensors"
    files[shard] = files.pop(WEIGHTS)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"lm_head.weight": shard}}).encode()
    fake_hub.add("org/m", files)
    with pytest.raises(Refused) as caught:
        registration.candidate("org/m")
    assert caught.value.reason in ("missing_shards", "bad_weights")


@pytest.mark.parametrize(
    "lie",
    [
        {"id": "../../etc"},
        {"id": "org/../m"},
        {"id": "org/m\x1b[2J"},
        {"id": "a/b/c"},
        {"id": ""},
        {"sha": "../../../etc"},
        {"sha": "main"},
        {"sha": "ABCDEF" * 6 + "0000"},
    ],
)
def test_an_answer_that_names_no_repo_and_commit_is_no_answer(
    fake_hub: FakeHub, tiny_llama: Path, lie: dict[str, str]
) -> None:
    fake_hub.add("org/m", files_of(tiny_llama)).extra |= lie
    with pytest.raises(HubUnavailable, match="is no Hub") as caught:
        registration.candidate("org/m")
    assert caught.value.message.isprintable()


def test_sizes_and_hashes_that_are_none(fake_hub: FakeHub, tiny_llama: Path) -> None:
    files = files_of(tiny_llama)
    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
    weights = next(each for each in siblings if each["rfilename"] == WEIGHTS)
    weights["lfs"] = {"sha256": "../" * 20 + "0000", "size": 1, "pointerSize": 1}
    fake_hub.add("org/m", files, siblings=siblings)
    found = registration.candidate("org/m")
    assert found.weights_hash is None
    assert found.facts["files"][WEIGHTS]["sha256"] is None
