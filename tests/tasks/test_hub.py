"""What the Hub does to people: moved branches, renamed repos, refusals, rate limits, full disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.errors import HubUnavailable, NoSpace, Refused
from registry.settings import settings
from tasks import hub, loading, registration
from tests.fake_hub import FakeHub, files_of
from tests.tiny_models import save_llama

Stored = Callable[[Any], Any]


def test_facts_come_without_weights(fake_hub: FakeHub, tiny_llama: Path) -> None:
    card = {"license": "apache-2.0", "base_model": ["org/base"], "language": "en"}
    repo = fake_hub.add(
        "Org/Tiny", files_of(tiny_llama), cardData=card, tags=["base_model:finetune:org/base"], gated="manual"
    )
    found = registration.candidate("Org/Tiny")
    commit = repo.refs["main"]
    assert (found.kind, found.handle, found.revision, found.source) == ("hub", "Org/Tiny", commit, "Org/Tiny")
    columns = found.columns
    assert (columns["architecture"], columns["model_type"], columns["dtype"]) == (
        "LlamaForCausalLM",
        "llama",
        "float32",
    )
    assert (columns["context_length"], columns["vocabulary"]) == (128, 278)
    assert (columns["licence"], columns["base_model"], columns["base_model_relation"]) == (
        "apache-2.0",
        "org/base",
        "finetune",
    )
    assert (columns["downloads"], columns["likes"], columns["gated"]) == (12, 3, "manual")
    assert columns["size_bytes"] == (tiny_llama / "model.safetensors").stat().st_size
    assert found.facts["refs"] == ["main"]
    # The header says it: a few bytes, by range.
    import torch  # noqa: F401
    from safetensors import safe_open

    with safe_open(tiny_llama / "model.safetensors", "pt") as stored:
        total = sum(stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118
    assert columns["parameters"] == total


def test_hub_and_folder_agree_on_the_weights(fake_hub: FakeHub, tiny_llama: Path) -> None:
    fake_hub.add("org/m", files_of(tiny_llama))
    fake_hub.add("other/upload", files_of(tiny_llama))
    local, first, second = (registration.candidate(each) for each in (str(tiny_llama), "org/m", "other/upload"))
    assert local.weights_hash == first.weights_hash == second.weights_hash is not None
    assert len({local.identity, first.identity, second.identity}) == 3
    same = ("architecture", "parameters", "dtype", "vocabulary", "context_length", "template_hash", "size_bytes")
    assert [local.columns[each] for each in same] == [first.columns[each] for each in same]


def test_identity_is_the_commit_not_the_spelling(fake_hub: FakeHub, tiny_llama: Path) -> None:
    repo = fake_hub.add("org/m", files_of(tiny_llama))
    first = registration.candidate("org/m")
    assert registration.candidate(f"org/m@{repo.refs['main']}").identity == first.identity
    repo.commit(files_of(tiny_llama) | {"README.md": b"new"})
    assert registration.candidate("org/m").identity != first.identity


def test_one_weight_format_is_downloaded_with_its_templates(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored
) -> None:
    """F14: and each file once, of the twelve that lie there."""
    files = files_of(tiny_llama)
    files |= {"original/consolidated.00.pth": b"0", "consolidated.safetensors": b"0", "onnx/model.onnx": b"0"}
    files |= {"pytorch_model.bin": b"0", "flax_model.msgpack": b"0", "m.Q4_0.gguf": b"0", "README.md": b"---\n---\n"}
    files |= {"additional_chat_templates/tool_use.jinja": b"{{ messages }}", "optimizer.pt": b"0"}
    fake_hub.add("org/m", files)
    loaded = loading.load(stored(registration.candidate("org/m")))
    assert loaded.tokenizer.chat_template
    assert len(fake_hub.files_asked()) == len(set(fake_hub.files_asked()))
    assert set(fake_hub.files_asked()) == set(files_of(tiny_llama)) | {"additional_chat_templates/tool_use.jinja"}


def test_a_warm_cache_does_not_hide_that_a_repo_is_gone(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F01: gone, gated, moved and unreachable are different things, and none of them is an old snapshot."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    for status, code, reason in (
        (404, "RepoNotFound", "not_found_or_private"),
        (403, "GatedRepo", "gated"),
        (404, "RevisionNotFound", "revision_gone"),
    ):
        fake_hub.refusals["org/m"] = (status, {"X-Error-Code": code})
        with pytest.raises(Refused) as caught:
            registration.candidate("org/m")
        assert caught.value.reason == reason
    fake_hub.refusals["org/m"] = (500, {})
    with pytest.raises(HubUnavailable):
        registration.candidate("org/m")
    # A registered commit that is here needs no request at all.
    before = len(fake_hub.requests)
    loading.load(known)
    assert len(fake_hub.requests) == before


def test_config_and_weights_are_of_one_commit_although_main_moves(
    fake_hub: FakeHub, tiny_llama: Path, tmp_path: Path, stored: Stored
) -> None:
    """F02."""
    repo = fake_hub.add("org/m", files_of(tiny_llama))
    first = repo.refs["main"]
    other = save_llama(tmp_path / "other", seed=1, max_position_embeddings=64)
    fake_hub.after_file.append(lambda: repo.commit(files_of(other)))
    known = registration.candidate("org/m")
    assert (known.revision, known.columns["context_length"]) == (first, 128)
    loaded = loading.load(stored(known))
    assert repo.refs["main"] != first
    assert loaded.context_length == 128
    from safetensors.torch import load_file

    weights = load_file(tiny_llama / "model.safetensors")
    assert loaded.model.get_input_embeddings().weight.equal(weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "gated"),
        (401, {"X-Error-Code": "GatedRepo"}, "gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "not_found_or_private"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "revision_gone"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "unauthorised"),
    ],
)
def test_which_refusal_it_is(fake_hub: FakeHub, status: int, headers: dict[str, str], reason: str) -> None:
    """F03: at the question for the commit."""
    fake_hub.refusals["org/m"] = (status, headers)
    with pytest.raises(Refused) as caught:
        registration.candidate("org/m")
    assert caught.value.reason == reason
    assert caught.value.hint


def test_a_gated_repo_shows_its_page_but_not_its_files(fake_hub: FakeHub, tiny_llama: Path) -> None:
    """F03."""
    repo = fake_hub.add("org/m", files_of(tiny_llama), gated="auto")
    repo.files_refused = (403, "GatedRepo")
    with pytest.raises(Refused) as caught:
        registration.candidate("org/m")
    assert caught.value.reason == "gated"


def test_a_disabled_repo_that_still_answers(fake_hub: FakeHub, tiny_llama: Path) -> None:
    """F03."""
    fake_hub.add("org/m", files_of(tiny_llama), disabled=True)
    with pytest.raises(Refused) as caught:
        registration.candidate("org/m")
    assert caught.value.reason == "disabled"


@pytest.mark.parametrize("place", ["api", "files"])
def test_a_rate_limit_is_no_missing_file(fake_hub: FakeHub, tiny_llama: Path, place: str, stored: Stored) -> None:
    """F04: though the library raises a FileNotFoundError for it."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    fake_hub.always = (429, {"Retry-After": "0"})
    with pytest.raises(HubUnavailable, match="limits our requests") as caught:
        registration.candidate("org/m") if place == "api" else loading.load(known)
    assert caught.value.retry_after_s == 0


def test_no_hub_at_all(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        registration.candidate("org/m")


def test_offline(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """F06."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        registration.candidate("org/m")


def test_a_renamed_repo_is_followed(fake_hub: FakeHub, tiny_llama: Path) -> None:
    """F11: by a 307 with a relative address; the old name stays as an alias."""
    fake_hub.add("NewOrg/Model", files_of(tiny_llama))
    fake_hub.moved["org/model"] = "NewOrg/Model"
    found = registration.candidate("org/model")
    assert (found.handle, found.source) == ("NewOrg/Model", "NewOrg/Model")
    assert found.aliases == (("org/model", "renamed"),)
    assert found.identity == registration.candidate("NewOrg/Model").identity


def test_no_room_is_seen_before_the_download(
    fake_hub: FakeHub, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F05."""
    fake_hub.add("org/m", files_of(tiny_llama))
    usage = hub.shutil.disk_usage("/")._replace(free=100_000)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpace, match="are free"):
        registration.candidate("org/m")
    assert "model.safetensors" not in fake_hub.files_asked()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_disk_is_a_fault_of_the_disk(
    fake_hub: FakeHub, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, stored: Stored
) -> None:
    """F05: seen before, and when it fills meanwhile; the model is not at fault."""
    from huggingface_hub import constants

    folder = save_llama(tmp_path / "larger", hidden_size=256, intermediate_size=512)
    assert (folder / "model.safetensors").stat().st_size > 2**21
    fake_hub.add("org/m", files_of(folder))
    known = stored(registration.candidate("org/m"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(small_disk))
    with pytest.raises(NoSpace, match="are free"):
        loading.load(known)
    # Somebody else fills the disk meanwhile: the download itself fails.
    monkeypatch.setattr(hub, "require_space", lambda *_: None)
    with pytest.warns(UserWarning, match="free disk space"), pytest.raises(NoSpace, match="filled"):
        loading.load(known)


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "gated"),
        (401, {"X-Error-Code": "GatedRepo"}, "gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "not_found_or_private"),
        (401, {"X-Error-Code": "RepoNotFound"}, "not_found_or_private"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "revision_gone"),
        (404, {"X-Error-Code": "EntryNotFound"}, "not_found_or_private"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "unauthorised"),
        (403, {}, "gated"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_which_refusal_it_is_while_files_are_fetched(
    fake_hub: FakeHub,
    tiny_llama: Path,
    stored: Stored,
    status: int,
    headers: dict[str, str],
    reason: str,
    warm: bool,
) -> None:
    """F03: also where a file of the commit is there and another is not (F08)."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    if warm:
        loading.load(known)
        weights = hub._cached("org/m", known.revision, "model.safetensors")
        assert weights is not None
        weights.resolve().unlink()
    fake_hub.always = (status, headers)
    with pytest.raises(Refused) as caught:
        loading.load(known)
    assert caught.value.reason == reason
    assert caught.value.hint


def test_refs_that_were_edited_by_hand_do_not_matter(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06: a newline after the commit in refs/main hides the whole snapshot from whoever asks for main."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    ref = Path(constants.HF_HUB_CACHE) / "models--org--m" / "refs" / "main"
    ref.parent.mkdir(exist_ok=True)
    ref.write_text(known.revision + "\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("org/m", "config.json", local_files_only=True)
    asked = len(fake_hub.requests)
    loading.load(known)
    assert len(fake_hub.requests) == asked


def test_offline_a_half_filled_cache_is_no_missing_file(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06, F08: what lacks is said to be unreachable, at once and however patient one is."""
    from huggingface_hub import constants

    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MODELKIN_HUB_PATIENCE_S", "300")
    settings.cache_clear()
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        loading.load(known)


def test_letter_case_makes_no_second_model(fake_hub: FakeHub, tiny_llama: Path) -> None:
    """F11: the Hub's spelling is kept, whatever was typed."""
    fake_hub.add("Org/Model", files_of(tiny_llama))
    fake_hub.moved["org/model"] = "Org/Model"
    typed, canonical = registration.candidate("org/model"), registration.candidate("Org/Model")
    assert (typed.handle, typed.source, typed.aliases) == ("Org/Model", "Org/Model", ())
    assert typed.identity == canonical.identity


def test_a_repo_renamed_after_registration_is_still_found(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F11: the registered name and commit lead to the files, through the redirect."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    fake_hub.add("new/m", {}).commits = fake_hub.repos.pop("org/m").commits
    fake_hub.moved["org/m"] = "new/m"
    loading.load(known)
    assert "model.safetensors" in fake_hub.sent


def test_an_interrupted_download_is_finished_by_the_next(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F08."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    # What a kill leaves: the snapshot folder with the small files only.
    loading.load(known)
    weights = hub._cached("org/m", known.revision, "model.safetensors")
    assert weights is not None
    weights.resolve().unlink()
    weights.unlink()
    loading.load(known)
    assert fake_hub.files_asked().count("model.safetensors") == 2


def test_gguf_of_a_repo(fake_hub: FakeHub) -> None:
    gguf = {"architecture": "llama", "context_length": 2048, "total": 7, "chat_template": "{{ messages }}"}
    repo = fake_hub.add("org/m-GGUF", {"m.Q4_K_M.gguf": b"01", "m.Q8_0.gguf": b"012"}, gguf=gguf)
    found = registration.candidate(f"org/m-GGUF@{repo.refs['main'][:40]}:m.Q4_K_M.gguf")
    assert (found.kind, found.file, found.columns["quantization"]) == ("hub", "m.Q4_K_M.gguf", "Q4_K_M")
    assert (found.columns["architecture"], found.columns["context_length"]) == ("LlamaForCausalLM", 2048)
    assert registration.candidate("org/m-GGUF:m.Q8_0.gguf").identity != found.identity
    assert not [name for name in fake_hub.files_asked() if name.endswith(".gguf")]
    fake_hub.repos["org/m-GGUF"].extra["gguf"]["architecture"] = "brandnew"
    with pytest.raises(Refused, match="cannot read GGUF files"):
        registration.candidate("org/m-GGUF:m.Q8_0.gguf")


def test_a_folder_here_is_pointed_out_where_the_hub_has_no_answer(
    fake_hub: FakeHub, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_llama.parent.parent)
    name = f"{tiny_llama.parent.name}/{tiny_llama.name}"
    for answer in ((404, {"X-Error-Code": "RepoNotFound"}), (500, {})):
        fake_hub.refusals[name] = answer
        with pytest.raises((Refused, HubUnavailable)) as caught:
            registration.candidate(name)
        assert caught.value.hint == f"a folder of that name lies here: to register it write ./{name}"
