"""What people type for a model that is to be registered."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from registry.errors import BadInput, NotFound

_REPO = r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?"
_HUB = re.compile(rf"(?P<repo>{_REPO})(?:@(?P<revision>[^:\s]+))?(?::(?P<file>\S+\.gguf))?")
_HUB_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}


@dataclass(frozen=True)
class HubReference:
    repo: str
    revision: str | None = None
    """Branch, tag, `refs/pr/N` or commit; None for the default branch."""
    file: str = ""
    """One GGUF file of the repo."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def parse(text: str) -> HubReference | Path:
    """`org/name[@rev][:FILE.gguf]`, a Hub URL, or a path: `./folder`, `/folder`, `~/folder`, `./file.gguf`.

    A relative path must begin with a dot, since `models/llama` is a Hub id too.  Raises BadInput for what is
    neither, NotFound for a path where nothing lies.
    """
    text = text.strip()
    if re.match(r"(https?://|hf://)", text) or text.split("/")[0] in _HUB_HOSTS:
        return _parse_url(text)
    if text.startswith((".", "/", "~")):
        path = Path(text).expanduser()
        if not path.exists():
            raise NotFound(f"nothing lies at {path}", hint="check the path; a Hub model is written org/name")
        return path.resolve()
    match = _HUB.fullmatch(text)
    if match is None or ".." in match["repo"]:
        forms = "org/name, org/name@revision, org/name@revision:FILE.gguf or ./path"
        raise BadInput(
            f"{text!r} names neither a Hub model nor a path",
            hint=f"write ./{text}" if Path(text).exists() else f"write {forms}",
        )
    return HubReference(match["repo"], match["revision"], match["file"] or "")


def _parse_url(text: str) -> HubReference:
    """…/org/name, …/org/name/tree/REV, …/org/name/blob/REV/FILE.gguf (also `resolve`)."""
    from huggingface_hub import constants

    whole = text if "://" in text else f"https://{text}"
    url = urllib.parse.urlsplit(whole)
    own_hub = urllib.parse.urlsplit(constants.ENDPOINT)
    if url.scheme != "hf" and url.netloc not in {*_HUB_HOSTS, own_hub.netloc}:
        raise BadInput(f"{text} is not on the Hub ({own_hub.netloc})", hint="give org/name or a path")
    path = f"{url.netloc}{url.path}" if url.scheme == "hf" else url.path
    parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
    if parts[0] in ("datasets", "spaces"):
        raise BadInput(f"{text} is a {parts[0].rstrip('s')}, not a model", hint="give the URL of a model")
    verbs = [index for index, part in enumerate(parts[:3]) if index and part in ("tree", "blob", "resolve")]
    if not verbs:
        if len(parts) > 2 and parts[2] not in ("discussions", "commits"):
            raise BadInput(f"{text} is no URL of a model", hint="give org/name")
        return HubReference("/".join(parts[:2]))
    repo, rest = "/".join(parts[: verbs[0]]), parts[verbs[0] + 1 :]
    # A branch may hold slashes only as refs/pr/N or refs/convert/NAME.
    size = 3 if rest[:1] == ["refs"] else 1
    revision, file = "/".join(rest[:size]) or None, "/".join(rest[size:])
    if file and not file.endswith(".gguf"):
        raise BadInput(f"{text} is one file of a repo", hint=f"register the repo: {repo}@{revision}")
    return HubReference(repo, revision, file)
