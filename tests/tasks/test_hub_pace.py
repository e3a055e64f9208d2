"""Waiting for the Hub: together, as long as it asks, never for ever.  (F04)"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.errors import HubUnavailable, Refused
from registry.settings import settings
from tasks import hub_pace
from tasks.hub_errors import retry_after


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    clock = Clock()
    monkeypatch.setattr(hub_pace, "_now", lambda: clock.now)
    monkeypatch.setattr(hub_pace, "_sleep", clock.sleep)
    monkeypatch.setattr(hub_pace, "_here", None)
    monkeypatch.setenv("MODELKIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELKIN_HUB_PATIENCE_S", "300")
    settings.cache_clear()
    yield clock
    monkeypatch.undo()
    settings.cache_clear()


def failing(times: int, error: Callable[[], BaseException]) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        if left[0] > 0:
            left[0] -= 1
            raise error()
        return "answer"

    return call


def limited(seconds: float | None = 20) -> HubUnavailable:
    return HubUnavailable("limited", retry_after_s=seconds)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what this process knows: only the file is left."""
    monkeypatch.setattr(hub_pace, "_here", None)


def test_it_waits_as_long_as_the_hub_asks(clock: Clock) -> None:
    told: list[float] = []
    assert hub_pace.patiently(failing(2, limited), "org/m", progress=told.append) == "answer"
    assert told == clock.slept
    assert len(told) == 2
    assert all(20 <= each <= 22.5 for each in told)


def test_without_a_stated_wait_it_doubles_with_jitter(clock: Clock) -> None:
    def failure() -> HubUnavailable:
        return HubUnavailable("500", retry_after_s=0)

    with pytest.raises(HubUnavailable, match="500"):
        hub_pace.patiently(failing(1000, failure), "org/m")
    for tries, seconds in enumerate(clock.slept):
        whole = min(60, 2**tries)
        assert whole / 2 <= seconds <= whole
    assert 300 - 60 <= sum(clock.slept) <= 300


def test_nobody_waits_longer_than_patience(clock: Clock) -> None:
    error = limited(301)
    with pytest.raises(HubUnavailable) as caught:
        hub_pace.patiently(failing(1, lambda: error), "org/m")
    assert caught.value is error
    assert clock.slept == []


def test_no_patience_is_one_try(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELKIN_HUB_PATIENCE_S", "0")
    settings.cache_clear()
    for seconds in (None, 0, 5):
        with pytest.raises(HubUnavailable):
            hub_pace.patiently(failing(1, lambda: limited(seconds)), "org/m")  # noqa: B023
    assert clock.slept == []


def test_a_refusal_is_not_tried_again(clock: Clock) -> None:
    with pytest.raises(Refused):
        hub_pace.patiently(failing(1, lambda: Refused("gated", "no")), "org/m")
    assert clock.slept == []


def test_offline_is_not_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailable):
        hub_pace.patiently(failing(1, lambda: HubUnavailable("offline")), "org/m")
    assert clock.slept == []


def test_where_nothing_answers_patience_is_short(clock: Clock) -> None:
    with pytest.raises(HubUnavailable):
        hub_pace.patiently(failing(1000, lambda: HubUnavailable("no such host")), "org/m")
    assert 0 < sum(clock.slept) <= 30


def test_all_workers_of_a_machine_pause_together(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubUnavailable):
        hub_pace.patiently(failing(1, lambda: limited(1000)), "org/first")
    another_process(monkeypatch)
    asked: list[int] = []
    with pytest.raises(HubUnavailable, match=r"another 1000 s.*org/second") as caught:
        hub_pace.patiently(lambda: asked.append(1), "org/second")
    assert caught.value.retry_after_s == 1000
    clock.now += 900
    hub_pace.patiently(lambda: asked.append(1), "org/second")
    assert asked == [1]
    assert len(clock.slept) == 1
    assert clock.slept[0] >= 100


def test_the_trouble_of_one_repo_does_not_stop_the_others(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_pace.patiently(failing(3, lambda: HubUnavailable("500 for one repo")), "org/first")
    another_process(monkeypatch)
    assert hub_pace.paused_s() == 0


def test_another_hub_does_not_pause(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with pytest.raises(HubUnavailable):
        hub_pace.patiently(failing(1, lambda: limited(1000)), "org/m")
    monkeypatch.setattr(constants, "ENDPOINT", "http://mirror.invalid")
    assert hub_pace.patiently(lambda: "answer", "org/m") == "answer"
    assert clock.slept == []


def test_a_shorter_pause_does_not_end_a_longer_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (1000, 400):
        another_process(monkeypatch)
        hub_pace._remember(hub_pace._pause(seconds))
    another_process(monkeypatch)
    assert hub_pace.paused_s() == 1000


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_cannot_lengthen_a_pause(clock: Clock, jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_pace._remember(hub_pace._pause(50))
    another_process(monkeypatch)
    clock.now += jump
    assert hub_pace.paused_s() <= 50
    # Put back for good: every reading says 50 s more.
    monkeypatch.setattr(hub_pace, "_now", lambda: 1_000_000.0 + jump)
    assert hub_pace.patiently(lambda: "answer", "org/m") == "answer"
    assert sum(clock.slept) <= 56


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00 no json",
        b"[]",
        b"null",
        b'{"endpoint": "E", "since": "x", "seconds": 5}',
        b'{"endpoint": "E", "since": NaN, "seconds": 5}',
        b'{"endpoint": "E", "since": 1000000.0, "seconds": 1e9}',
        b'{"endpoint": "E", "since": 1000000.0, "seconds": NaN}',
        b'{"endpoint": "E", "since": 1000000.0, "seconds": -5}',
        b'{"endpoint": "E", "since": 1' + b"0" * 5000 + b', "seconds": 5}',
        b"[" * 100_000,
    ],
)
def test_garbage_in_the_file_is_no_pause_and_is_overwritten(
    clock: Clock, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    path = hub_pace._file()
    path.parent.mkdir()
    path.write_bytes(content.replace(b'"E"', json.dumps(constants.ENDPOINT).encode()))
    assert hub_pace.patiently(lambda: "answer", "org/m") == "answer"
    assert clock.slept == []
    hub_pace._remember(hub_pace._pause(50))
    another_process(monkeypatch)
    assert hub_pace.paused_s() == 50


def test_a_home_that_cannot_be_written_leaves_this_process_its_own_pause(clock: Clock) -> None:
    # A file where the folder should be: also root cannot write there.
    settings().home.write_text("")
    assert hub_pace.patiently(failing(1, limited), "org/m") == "answer"
    assert len(clock.slept) == 1
    hub_pace._remember(hub_pace._pause(50))
    assert hub_pace.paused_s() == 50


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_something_else_of_that_name(clock: Clock, make: Callable[[Path], None]) -> None:
    settings().home.mkdir()
    make(hub_pace._file())
    assert hub_pace.patiently(failing(1, limited), "org/m") == "answer"


def test_a_stopped_worker_that_holds_the_lock_stops_nobody(clock: Clock) -> None:
    import fcntl

    hub_pace._remember(hub_pace._pause(10))
    with hub_pace._file().open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        hub_pace._remember(hub_pace._pause(50))
    assert hub_pace.paused_s() == 50


def test_many_threads_write_one_whole_pause(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [
        threading.Thread(target=hub_pace._write, args=(hub_pace._file(), hub_pace._pause(seconds)))
        for seconds in range(10, 60)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert hub_pace.paused_s() == 59


def test_a_wait_is_said_on_stderr_where_nobody_asked_to_be_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    hub_pace.patiently(failing(1, limited), "org/m")
    assert "org/m in 2" in caplog.text
    assert "Ctrl-C" in caplog.text


def test_ctrl_c_ends_the_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_pace, "_sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub_pace.patiently(failing(1, limited), "org/m")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": " 7 "}, 7),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=10;t=55'}, None),
        ({}, None),
    ],
)
def test_how_long_an_answer_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds
