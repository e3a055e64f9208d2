"""One spelling for a JSON value, so that equal things hash equal."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, UTF-8 kept, NaN refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_hex(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def hash_json(value: Any) -> str:
    """sha256 hex of the canonical JSON."""
    return sha256_hex(canonical_json(value))
