"""Texts to token ids: whole strings with exact offsets, continuations without a dummy space, and a check of both."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.canonical import canonical_json, hash_json, sha256_hex
from registry.errors import Refused

_ANCHORS = ("\n", "=", "…", "x")
"""Strings put before a continuation, so that nothing is prepended to it; one that does not merge with it is used."""

_PROBES = (
    "Hello world",
    "The answer is 42, isn't it?\n\n\tdef f(x):\n        return x ** 2",
    "Crème brûlée – “naïve” 日本語 한국어 العربية 😀👩‍👩‍👧 ∀x∈ℝ",
)


class Tokenization:
    """One tokenizer, as rendering needs it.

    `has_offsets` says whether `encode` can tell where each token stands.  The offsets are those of the tokenizer
    without its post-processor: byte-level post-processors trim white space off the offsets, which hides that a token
    covers the blank before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = _backend_json(tokenizer)
        self.hash = _hash(tokenizer, backend)
        self._raw = _without_post_processor(backend)
        if self._raw is not None and any(self._joint(text)[0] != self.ids(text) for text in _PROBES):
            self._raw = None  # a subclass does more than its backend: only its own ids count, and they have no offsets
        self.has_offsets = self._raw is not None
        self._adds_space = any(self.ids("\n" + text) != self.ids("\n") + self.ids(text) for text in ("hello", "7", "."))

    def ids(self, text: str) -> list[int]:
        """As the tokenizer itself encodes `text`, nothing added."""
        if not text:
            return []
        if self._raw is not None:
            return self._joint(text)[0]
        return [int(one) for one in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and, for each, the half-open range of characters it came from.

        Characters of several tokens (an emoji in bytes) give each of these tokens the whole character.
        """
        assert self._raw is not None, "ask has_offsets first"
        return self._joint(text)

    def continuation(self, text: str) -> list[int] | None:
        """Ids of `text` as something that follows other text; None where they do not decode back to it.

        SentencePiece-like tokenizers put a blank before whatever they are given; here it is kept out by encoding after
        an anchor.
        """
        for anchor in _ANCHORS:
            before = self.ids(anchor)
            whole = self.ids(anchor + text) if self._adds_space else before + self.ids(text)
            if whole[: len(before)] != before:
                continue
            head = self._decode(before)
            if len(whole) > len(before) and self._decode(whole) == head + text:
                return whole[len(before) :]
        return None

    def _joint(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._raw.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._tokenizer, ids)


def verify_tokenizer(tokenizer: Any, tokenizer_json: Path | str | None) -> None:
    """Raises Refused("bad_tokenizer") where the loaded tokenizer is not the one in the files, or loses text.

    transformers rebuilds some tokenizers from their class name; with a class that does not fit the file, blanks vanish
    or turn to <unk> without an error.  So ids must equal those of the raw `tokenizer.json` where there is one, and
    decoding must give the text back up to Unicode normalisation and, where the tokenizer lower-cases, letter case.
    Characters outside ASCII may be unknown to it.
    """
    raw = None
    if tokenizer_json is not None:
        from tokenizers import Tokenizer

        raw = Tokenizer.from_file(str(tokenizer_json))
    lower = '"Lowercase"' in (_backend_json(tokenizer) or "")
    for text in _PROBES:
        try:
            ids = [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]
            decoded = _decode(tokenizer, ids)
        except Exception as error:  # the Rust backend raises plain Exception, a remote class anything
            raise _bad(f"the loaded {type(tokenizer).__name__} fails on {text[:20]!r}: {error}") from error
        if raw is not None and ids != raw.encode(text, add_special_tokens=False).ids:
            raise _bad(f"the loaded {type(tokenizer).__name__} and tokenizer.json disagree on {text[:20]!r}")
        if _normal(decoded, lower) == _normal(text, lower):
            continue
        unknown = getattr(tokenizer, "unk_token_id", None)
        if text.isascii() or unknown is None or unknown not in ids:
            raise _bad(f"the loaded {type(tokenizer).__name__} turns {text[:20]!r} into {decoded[:20]!r}")


def require_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raises Refused("bad_tokenizer") for an id without an embedding row.

    On a card such an id kills the whole process ("device-side assert") and everything after it.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        worst = max(ids) if max(ids) >= vocabulary else min(ids)
        raise _bad(f"token id {worst} has no row among the {vocabulary} embeddings")


def _bad(message: str) -> Refused:
    return Refused("bad_tokenizer", message, hint="the tokenizer files do not fit the model; check the repository")


def _normal(text: str, lower: bool) -> str:
    text = unicodedata.normalize("NFKC", text).strip()
    return text.casefold() if lower else text


def _decode(tokenizer: Any, ids: list[int]) -> str:
    options = {} if getattr(tokenizer, "is_fast", False) else {"spaces_between_special_tokens": False}
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False, **options))


def _backend_json(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if getattr(tokenizer, "is_fast", False) and backend is not None else None


def _without_post_processor(backend: str | None) -> Any:
    if backend is None:
        return None
    from tokenizers import Tokenizer

    raw = Tokenizer.from_str(backend)
    raw.post_processor = None
    raw.no_truncation()
    raw.no_padding()
    return raw


def _hash(tokenizer: Any, backend: str | None) -> str:
    """Of the backend without padding and truncation, which are call settings; of the vocabulary where there is none."""
    if backend is not None:
        content = json.loads(backend)
        content.pop("padding", None)
        content.pop("truncation", None)
        return sha256_hex(canonical_json(content))
    return hash_json({"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()})
