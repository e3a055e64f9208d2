"""Downloads over a bad line, from a bad disk or a Hub that is not to be trusted; waits seen from the commands."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from registry.errors import HubUnavailable, Refused
from registry.settings import settings
from tasks import hub, hub_checks, hub_pace, loading, registration
from tests.fake_hub import FakeHub, files_of

Stored = Callable[[Any], Any]
WEIGHTS = "model.safetensors"


@pytest.fixture
def patient(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    """300 s of patience, of which nobody sleeps one: the waits are listed, and end what `always` answers."""
    slept: list[float] = []
    offset = [0.0]
    real = hub_pace._now

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        offset[0] += seconds
        fake_hub.always = None

    monkeypatch.setattr(hub_pace, "_now", lambda: real() + offset[0])
    monkeypatch.setattr(hub_pace, "_sleep", sleep)
    monkeypatch.setattr(hub_pace, "_here", None)
    monkeypatch.setenv("MODELKIN_HUB_PATIENCE_S", "300")
    monkeypatch.setenv("MODELKIN_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield slept
    monkeypatch.delenv("MODELKIN_HUB_PATIENCE_S")
    settings.cache_clear()


@pytest.fixture
def no_pause_between_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub sleeps a second before it resumes, and at a multiple of its chunks, of ten megabytes."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)


def blob(name: str, repo: str, commit: str) -> Path:
    path = hub._cached(repo, commit, name)
    assert path is not None
    return path.resolve()


def flipped(data: bytes) -> bytes:
    """Of the same size, one bit of the last tensor changed."""
    return data[:-1] + bytes([data[-1] ^ 1])


# Rate limits and outages (F04)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_busy_hub_is_waited_for(
    fake_hub: FakeHub, tiny_llama: Path, patient: list[float], status: int, after: int
) -> None:
    """F04: whichever of the requests of a registration meets it."""
    fake_hub.add("org/m", files_of(tiny_llama))
    answered = len(fake_hub.requests)

    def busy_from_now() -> None:
        fake_hub.next.extend([(status, {"Retry-After": "2"})] * 2)

    if after == 0:
        busy_from_now()
    else:
        fake_hub.after_file.extend([lambda: None] * (after - 1) + [busy_from_now])
    assert registration.candidate("org/m").handle == "org/m"
    assert not fake_hub.next
    assert patient
    assert len(fake_hub.requests) > answered


@pytest.mark.parametrize("form", ["seconds", "date", "draft"])
@pytest.mark.parametrize("place", ["api", "files"])
def test_it_waits_as_long_as_the_answer_says(
    fake_hub: FakeHub, tiny_llama: Path, patient: list[float], stored: Stored, form: str, place: str
) -> None:
    """F04: in seconds, as a date (against the Hub's clock, here an hour ahead), as the draft standard has it."""
    now = datetime.now(UTC) + timedelta(hours=1)
    headers = {
        "seconds": {"Retry-After": "40"},
        "date": {"Retry-After": format_datetime(now + timedelta(seconds=40), True), "Date": format_datetime(now, True)},
        "draft": {"RateLimit": '"api";r=0;t=40'},
    }[form]
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    fake_hub.always = (429, headers)
    if place == "api":
        registration.candidate("org/m")
    else:
        loading.load(known)
    assert len(patient) == 1
    assert 40 <= patient[0] <= 45


def test_the_client_does_not_wait_by_itself(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F04: without our hook each file is asked for seven times, with sleeps that nobody is told of."""
    import time

    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    monkeypatch.setattr(hub_pace, "_here", None)
    slept: list[float] = []
    # `http_backoff` calls it through the module.
    monkeypatch.setattr(time, "sleep", slept.append)
    asked = len(fake_hub.requests)
    fake_hub.always = (503, {})
    with pytest.raises(HubUnavailable, match="answers 503"):
        loading.load(known)
    assert slept == []
    # Two requests for each of the few files that are fetched at once.
    assert len(fake_hub.requests) - asked <= 2 * (hub.DOWNLOADS_AT_ONCE + 3)


def test_a_limit_met_by_one_worker_stops_the_next_before_it_asks(
    fake_hub: FakeHub, tiny_llama: Path, patient: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F04: ten workers do not each find out."""
    fake_hub.add("org/m", files_of(tiny_llama))
    fake_hub.always = (429, {"Retry-After": "3000"})
    with pytest.raises(HubUnavailable, match="limits our requests"):
        registration.candidate("org/m")
    asked = len(fake_hub.requests)
    for _ in range(10):
        # What another process knows.
        monkeypatch.setattr(hub_pace, "_here", None)
        with pytest.raises(HubUnavailable, match="for another"):
            registration.candidate("org/m")
    assert len(fake_hub.requests) == asked


def test_a_retry_fetches_only_what_is_missing(
    fake_hub: FakeHub, tiny_llama: Path, patient: list[float], stored: Stored
) -> None:
    """F04, F14."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    fake_hub.after_file.append(lambda: fake_hub.next.extend([(503, {"Retry-After": "1"})] * 3))
    loading.load(known)
    assert patient
    assert len(fake_hub.sent) == len(set(fake_hub.sent))


# Cut connections and half files (F08)


def test_a_cut_connection_is_resumed(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, no_pause_between_resumes: None
) -> None:
    """F08: from the byte where it was cut, and the whole is what was uploaded."""
    files = files_of(tiny_llama)
    repo = fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    fake_hub.ranges.clear()
    repo.cuts[WEIGHTS] = [1000, 500]
    loading.load(known)
    assert [span for name, span in fake_hub.ranges if name == WEIGHTS] == ["bytes=1000-", "bytes=1500-"]
    assert blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


def test_a_server_that_ignores_ranges_sends_the_whole_again(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, no_pause_between_resumes: None
) -> None:
    """F08: the half is not kept before the whole."""
    files = files_of(tiny_llama)
    repo = fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    fake_hub.ranges_ignored = True
    repo.cuts[WEIGHTS] = [1000]
    loading.load(known)
    assert blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


def test_a_line_that_never_holds_is_the_hubs_trouble_and_leaves_no_half(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, no_pause_between_resumes: None
) -> None:
    """F08: nothing of it passes for the file later."""
    repo = fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    repo.cuts[WEIGHTS] = [0] * 10
    with pytest.raises(HubUnavailable):
        loading.load(known)
    cache = Path(os.environ["HF_HUB_CACHE"])
    assert not list(cache.rglob("*.incomplete"))
    assert hub._cached("org/m", known.revision, WEIGHTS) is None
    repo.cuts.clear()
    loading.load(known)


def test_a_shorter_file_than_stated(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F08: cut by a proxy that states the length of what it sends."""
    files = files_of(tiny_llama)
    repo = fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    repo.served[WEIGHTS] = files[WEIGHTS][:-100]
    with pytest.raises(HubUnavailable, match="less or more of a file"):
        loading.load(known)


def test_a_half_left_by_a_kill_is_no_file(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F08: `.incomplete` is neither loaded nor in the way."""
    files = files_of(tiny_llama)
    fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    blobs = Path(os.environ["HF_HUB_CACHE"]) / "models--org--m" / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    digest = known.facts["files"][WEIGHTS]["sha256"]
    for name in (f"{digest}.incomplete", f"{digest}.01234567.incomplete"):
        (blobs / name).write_bytes(files[WEIGHTS][:1000])
    loading.load(known)
    assert blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_damaged_blob_is_fetched_again(fake_hub: FakeHub, tiny_llama: Path, stored: Stored, damage: str) -> None:
    """F08: also where the library, which looks at names only, would be content."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    for name in (WEIGHTS, "config.json"):
        place = blob(name, "org/m", known.revision)
        whole = place.read_bytes()
        if damage == "gone":
            place.unlink()
        else:
            place.write_bytes(whole[:50] if damage == "cut" else b"")
        loading.load(known)
        assert blob(name, "org/m", known.revision).read_bytes() == whole


# Content that is not what its hash says


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
    assert blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


def test_a_bad_disk_is_healed_by_the_hub_or_said(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F08, F04, F06: a bit flipped in the cache, met while the Hub limits us, while offline, and when it answers."""
    from huggingface_hub import constants

    files = files_of(tiny_llama)
    fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    blob(WEIGHTS, "org/m", known.revision).write_bytes(flipped(files[WEIGHTS]))
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
    assert blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


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
    os.utime(blob(WEIGHTS, "org/m", known.revision))
    loading.load(known)
    assert len(hashed) == 3


def test_whoever_has_the_old_file_open_keeps_it(fake_hub: FakeHub, tiny_llama: Path, stored: Stored) -> None:
    """F09: a damaged file is replaced, never deleted or rewritten under a process that has it mapped."""
    files = files_of(tiny_llama)
    fake_hub.add("org/m", files)
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    place = blob(WEIGHTS, "org/m", known.revision)
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
    blob(WEIGHTS, "org/m", known.revision).write_bytes(b"")
    loading.load(known)
    assert {path: path.stat().st_ino for path in before} == before


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
    import json

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


# What a person sees


def test_ctrl_c_ends_a_large_download(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F08: large files are fetched by the calling thread, the only one that Ctrl-C reaches; no half is left."""
    import huggingface_hub

    monkeypatch.setattr(hub, "LARGE_FILE", 1000)
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    real, threads = huggingface_hub.hf_hub_download, {}

    def watched(repo: str, name: str, **options: Any) -> str:
        threads[name] = threading.current_thread()
        if name == WEIGHTS:
            raise KeyboardInterrupt
        return real(repo, name, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", watched)
    with pytest.raises(KeyboardInterrupt):
        loading.load(known)
    assert threads[WEIGHTS] is threading.main_thread()
    assert threads["generation_config.json"] is not threading.main_thread()


def waiting_command(fake_hub: FakeHub, environment: dict[str, str], patience: int) -> subprocess.Popen[str]:
    """`modelkin model add org/m` of a person who waits for the Hub."""
    hub_settings = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, "-c", "from api.cli import main; main()", "model", "add", "org/m"],
        env=environment | hub_settings | {"HF_HUB_OFFLINE": "0", "MODELKIN_HUB_PATIENCE_S": str(patience)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_model_add_says_that_it_waits_and_goes_on(
    fake_hub: FakeHub, tiny_llama: Path, modelkin_env: dict[str, str]
) -> None:
    """F04."""
    fake_hub.add("org/m", files_of(tiny_llama))
    fake_hub.next.append((429, {"Retry-After": "1"}))
    out, said = waiting_command(fake_hub, modelkin_env, 60).communicate()
    assert "going on with org/m in" in said
    assert "Traceback" not in said
    assert "registered org/m@" in said
    assert "org/m" in out


def test_ctrl_c_ends_the_wait_of_model_add(fake_hub: FakeHub, tiny_llama: Path, modelkin_env: dict[str, str]) -> None:
    """F04."""
    fake_hub.add("org/m", files_of(tiny_llama))
    fake_hub.always = (429, {"Retry-After": "250"})
    waiting = waiting_command(fake_hub, modelkin_env, 300)
    assert waiting.stderr is not None
    assert "Ctrl-C ends it" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate()
    assert waiting.returncode == 130
    assert "Traceback" not in said


def test_model_add_without_patience_fails_at_once(
    fake_hub: FakeHub, tiny_llama: Path, modelkin_env: dict[str, str]
) -> None:
    """F04."""
    fake_hub.always = (429, {"Retry-After": "250"})
    waiting = waiting_command(fake_hub, modelkin_env, 0)
    _, said = waiting.communicate()
    assert (waiting.returncode, "the Hub limits our requests" in said) == (7, True)


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
