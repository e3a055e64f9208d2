"""A small Hub on the loopback: enough of its HTTP to drive the real huggingface_hub client through every outcome.

As on the Hub, small files are sent from /resolve/ with their git blob id as etag; large ones (LFS, chosen by suffix)
answer there with a redirect to another host, X-Linked-Etag (SHA-256) and X-Linked-Size.  A renamed repo answers 307
with a relative Location.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from registry.settings import settings

Files = dict[str, bytes]


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flipped(data: bytes) -> bytes:
    """Of the same size, with one bit of the last byte changed."""
    return data[:-1] + bytes([data[-1] ^ 1])


def cached_blob(name: str, repo: str, commit: str) -> Path:
    """Where the Hub cache keeps the bytes of a file that it has."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    assert isinstance(found, str), f"{name} is not cached"
    return Path(found).resolve()


@dataclass
class FakeRepo:
    id: str
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Merged into the answer of /api/models: tags, gated, cardData, safetensors, downloads."""
    files_refused: tuple[int, str] | None = None
    """(status, X-Error-Code) for every file, as a gated repo does that shows its page."""

    served: dict[str, bytes] = field(default_factory=dict)
    """Name → what is sent in place of the committed bytes, under the etag and size of these."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """Name → after how many bytes the connection is cut, once for each entry."""

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        content = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items()))
        sha = hashlib.sha1(f"{self.id}{len(self.commits)}{content}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha


class FakeHub:
    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, FakeRepo] = {}
        self.moved: dict[str, str] = {}
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}
        """Repo id → (status, headers) for its API answer."""
        self.always: tuple[int, dict[str, str]] | None = None
        """One answer for everything: rate limit or outage."""
        self.requests: list[tuple[str, str]] = []
        self.after_file: list[Any] = []
        """Called once, in turn, after a file was served."""
        self.next: list[tuple[int, dict[str, str]]] = []
        """Answers for the next requests, before anything else is looked at."""
        self.ranges_ignored = False
        """Answers 200 and the whole file to whoever asks for a part."""
        self.xet: int | None = None
        """Large files lie in Xet, whose storage answers this status."""
        self.sent: list[str] = []
        """Names of files whose bytes were sent whole or up to a cut."""
        self.ranges: list[tuple[str, str]] = []
        """(name, Range) of what was asked for in part."""
        self.tokens: list[tuple[str, str]] = []
        """(host, Authorization) of each request that had one."""

    def add(self, id: str, files: Mapping[str, bytes], **extra: Any) -> FakeRepo:
        repo = FakeRepo(id, extra=extra)
        repo.commit(files)
        self.repos[id] = repo
        return repo

    def files_asked(self) -> list[str]:
        """Names of files whose bytes were sent."""
        return list(self.sent)

    def stored(self, sha256: str) -> tuple[FakeRepo, str, bytes]:
        for repo in self.repos.values():
            for files in repo.commits.values():
                for name, data in files.items():
                    if hashlib.sha256(data).hexdigest() == sha256:
                        return repo, name, data
        raise KeyError(sha256)


LFS = (".safetensors", ".gguf", ".bin", ".parquet")


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append(("RANGE" if "Range" in self.headers else self.command, path))
        if "Authorization" in self.headers:
            self.hub.tokens.append((self.headers["Host"].split(":")[0], self.headers["Authorization"]))
        if self.hub.always is not None:
            self._answer(*self.hub.always)
            return
        if self.hub.next:
            self._answer(*self.hub.next.pop(0))
            return
        if path.startswith("/lfs/"):
            self._bytes(*self.hub.stored(path.removeprefix("/lfs/")), {})
            return
        if self.hub.xet is not None and "/xet-read-token/" in path:
            token = {"X-Xet-Cas-Url": self.hub.url, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": "9999999999"}
            self._answer(200, token)
            return
        if self.hub.xet is not None and "/reconstructions/" in path:
            self._answer(self.hub.xet, {})
            return
        api = re.fullmatch(r"/api/models/(?P<id>[^/]+(?:/[^/]+)?)(?:/revision/(?P<rev>.+))?", path)
        file = re.fullmatch(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>refs/[^/]+/[^/]+|[^/]+)/(?P<name>.+)", path)
        found = api or file
        if found is None:
            self._answer(404, {})
            return
        id, revision = found["id"], found["rev"] or "main"
        if id in self.hub.moved:
            self._answer(307, {"Location": self.path.replace(id, self.hub.moved[id])})
        elif id in self.hub.refusals:
            self._answer(*self.hub.refusals[id])
        elif id not in self.hub.repos:
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        else:
            repo = self.hub.repos[id]
            commit = repo.refs.get(revision, revision)
            if commit not in repo.commits:
                self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            elif api is not None:
                self._info(repo, commit)
            else:
                self._file(repo, commit, found["name"])

    def _info(self, repo: FakeRepo, commit: str) -> None:
        siblings = []
        for name, data in repo.commits[commit].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob_id(data)}
            if name.endswith(LFS):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": repo.id, "modelId": repo.id, "sha": commit, "private": False, "disabled": False, "gated": False}
        body |= {"tags": [], "downloads": 12, "likes": 3, "siblings": siblings} | repo.extra
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, repo: FakeRepo, commit: str, name: str) -> None:
        if repo.files_refused is not None:
            self._answer(repo.files_refused[0], {"X-Error-Code": repo.files_refused[1]})
            return
        data = repo.commits[commit].get(name)
        if data is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(LFS):
            self._bytes(repo, name, data, headers | {"ETag": f'"{git_blob_id(data)}"'})
            return
        digest = hashlib.sha256(data).hexdigest()
        # The same server by another name: another host, as the Hub's storage is.
        headers["Location"] = self.hub.url.replace("127.0.0.1", "localhost") + f"/lfs/{digest}"
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        if self.hub.xet is not None:
            route = f"{self.hub.url}/api/models/{repo.id}/xet-read-token/{commit}"
            headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": route}
        self._answer(302, headers)

    def _bytes(self, repo: FakeRepo, name: str, data: bytes, headers: dict[str, str]) -> None:
        data = repo.served.get(name, data)
        headers = {"Accept-Ranges": "bytes"} | headers
        status, body = 200, data
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is not None:
            self.hub.ranges.append((name, self.headers["Range"]))
        if asked is not None and not self.hub.ranges_ignored:
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, body = 206, data[first : last + 1]
        if self.command == "GET" and asked is None:
            self.hub.sent.append(name)
        cuts = repo.cuts.get(name, []) if self.command == "GET" else []
        self._answer(status, headers, body, cut=cuts.pop(0) if cuts else None)
        if self.command == "GET" and self.hub.after_file:
            self.hub.after_file.pop(0)()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes = b"", cut: int | None = None) -> None:
        # Without a Date of the server's own where the answer brings one.
        (self.send_response_only if "Date" in headers else self.send_response)(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def serving() -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """huggingface_hub talks to a Hub of this test's own, with an empty cache; `HF_*` are set for subprocesses too."""
    from huggingface_hub import constants
    from huggingface_hub import utils as hub_utils

    with serving() as hub:
        cache = tmp_path / "hub-cache"
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        # A test that wants to wait says so.
        environment |= {"MODELKIN_HUB_PATIENCE_S": "0"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        settings.cache_clear()
        # The library read its environment when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub_utils.disable_progress_bars()
        yield hub
        hub_utils.enable_progress_bars()
        monkeypatch.delenv("MODELKIN_HUB_PATIENCE_S", raising=False)
        settings.cache_clear()
