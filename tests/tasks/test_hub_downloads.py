"""Downloads from a busy Hub and over a bad line; waits seen from the commands."""

from __future__ import annotations

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

from registry.errors import HubUnavailable, NoSpace
from registry.settings import settings
from tasks import hub, hub_pace, loading, registration
from tasks.hub_errors import hub_errors
from tests.fake_hub import FakeHub, cached_blob, files_of

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
    assert cached_blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


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
    assert cached_blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


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
    assert cached_blob(WEIGHTS, "org/m", known.revision).read_bytes() == files[WEIGHTS]


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_damaged_blob_is_fetched_again(fake_hub: FakeHub, tiny_llama: Path, stored: Stored, damage: str) -> None:
    """F08: also where the library, which looks at names only, would be content."""
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    loading.load(known)
    for name in (WEIGHTS, "config.json"):
        place = cached_blob(name, "org/m", known.revision)
        whole = place.read_bytes()
        if damage == "gone":
            place.unlink()
        else:
            place.write_bytes(whole[:50] if damage == "cut" else b"")
        loading.load(known)
        assert cached_blob(name, "org/m", known.revision).read_bytes() == whole


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


@pytest.mark.parametrize("status", [403, 404, 429, 500])
def test_trouble_of_the_storage_behind_the_hub(
    fake_hub: FakeHub, tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """F03, F04: hf_xet raises a RuntimeError for everything; its own retries, minutes of them, are cut to one here."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    fake_hub.add("org/m", files_of(tiny_llama))
    known = stored(registration.candidate("org/m"))
    fake_hub.xet = status
    with pytest.raises(HubUnavailable, match=rf"storage \(Xet\) answers {status} for org/m"):
        loading.load(known)


def test_what_xet_says_of_a_disk_is_of_the_disk() -> None:
    """F05."""
    with pytest.raises(NoSpace), hub_errors("org/m"):
        raise RuntimeError("Task error: File reconstruction error: IO Error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="of another kind"), hub_errors("org/m"):
        raise RuntimeError("of another kind")


def test_a_token_that_xet_refuses_is_no_file_of_ours() -> None:
    """F03: XetAuthenticationError is a PermissionError."""
    from hf_xet import XetAuthenticationError

    with pytest.raises(HubUnavailable, match="storage"), hub_errors("org/m"):
        raise XetAuthenticationError("expired")
