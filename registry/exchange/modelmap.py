"""The log-likelihoods of shimo-lab/modelmap: what its code writes, and what its authors publish.

One JSON Lines file a model, `org--name_float16.jsonl`, a line a text; texts are known by their number alone:

    {"index": 0, "num-tokens": 4, "log-likelihood": -9.25, "token-log-probs": [-2.5, -4.0, -2.75]}

    index             position of the text in the list that was scored
    num-tokens        of the whole text; the first is never scored
    log-likelihood    nats, the sum of token-log-probs
    token-log-probs   one a scored token

Published pickles: {"org/name": array of nats, …}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from registry.errors import BadInput, Unparseable, Unsupported
from registry.exchange import pickled
from registry.exchange.vector_file import (
    FileRow,
    FileTexts,
    Heading,
    VectorFile,
    checked,
    file_sha256,
    foreign_row,
)

MAX_TEXTS = 10_000_000
MAX_LINE_BYTES = 1 << 26
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_NAME = re.compile(r"(?P<name>.+?)(?:[_.-](?P<dtype>float16|bfloat16|float32|float64|fp16|bf16|fp32))?")


def read_jsonl(paths: Sequence[Path], unit: str = "nats") -> VectorFile:
    """Files of several models on the same texts, as one matrix; a text that a file lacks is `not_scored` there.

    Raises Unparseable naming file and line.
    """
    found = [(*_model_of(path), _lines(path)) for path in paths]
    count = 1 + max(max(lines) for _, _, lines in found)
    rows = []
    for name, dtype, lines in found:
        values, counts = np.full(count, np.nan), np.zeros(count, np.int32)
        for index, (value, tokens) in lines.items():
            values[index], counts[index] = value, tokens
        rows.append(foreign_row(name, values, counts=counts, dtype=dtype))
    heading = Heading(FileTexts(count), unit)
    names = tuple(path.name for path in paths)
    return checked(VectorFile("modelmap-jsonl", names, file_sha256(paths), heading, tuple(rows)))


def _model_of(path: Path) -> tuple[str, str]:
    """(model, dtype) from `org--name_float16.jsonl`, or from the folder where the file is not called after it."""
    stem = path.name.removesuffix(".jsonl")
    folder = path.resolve().parent.name
    match = _NAME.fullmatch(folder if "--" not in stem and "--" in folder else stem)
    assert match is not None  # any name matches
    dtype = match["dtype"] or "unknown"
    return match["name"].replace("--", "/", 1), _DTYPES.get(dtype, dtype)


def _lines(path: Path) -> dict[int, tuple[float, int]]:
    """Text → (log-likelihood, scored tokens)."""
    found: dict[int, tuple[float, int]] = {}
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES):
            number += 1
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            index, value, tokens = _entry(line, where)
            if index in found:
                raise BadInput(f"{where}: the text {index} is there a second time", hint="keep one line a text")
            found[index] = value, tokens
    if not found:
        raise Unparseable(f"{path} is empty", hint="give a file with a line a text")
    return found


def _entry(line: bytes, where: str) -> tuple[int, float, int]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else "the line is cut off: "
        raise Unparseable(
            f"{where}: {cut}not JSON ({error})", hint="fetch the file again; nothing was stored"
        ) from error
    if not isinstance(parsed, dict):
        raise Unparseable(f"{where}: {type(parsed).__name__}, not an object")
    # Both spellings are in use.
    fields = {key.replace("_", "-"): value for key, value in parsed.items()}
    index, value, each = fields.get("index"), fields.get("log-likelihood"), fields.get("token-log-probs")
    if type(index) is not int or not 0 <= index < MAX_TEXTS:
        raise Unparseable(f"{where}: its index is {index!r:.40}, not the number of a text", hint=_EXPECTED)
    if each is not None and not (isinstance(each, list) and all(_is_number(one) for one in each)):
        raise Unparseable(f"{where}: its token-log-probs are not a list of numbers", hint=_EXPECTED)
    if value is None and each is not None:
        value = sum(each)
    if not _is_number(value) and "log-likelihood" not in fields:
        raise Unparseable(f"{where}: no log-likelihood; its keys are {', '.join(parsed)[:200]}", hint=_EXPECTED)
    if value is not None and not _is_number(value):
        raise Unparseable(f"{where}: its log-likelihood is {value!r:.40}, not a number", hint=_EXPECTED)
    tokens = fields.get("num-tokens")
    if each is None and tokens is not None and (type(tokens) is not int or not 0 <= tokens < 1 << 31):
        raise Unparseable(f"{where}: its num-tokens is {tokens!r:.40}, not a count", hint=_EXPECTED)
    scored = len(each) if each is not None else max((tokens or 0) - 1, 0)
    try:
        return index, math.nan if value is None else float(value), scored
    except OverflowError as error:
        raise Unparseable(f"{where}: its log-likelihood is out of range") from error


_EXPECTED = 'a line is {"index": 0, "num-tokens": 4, "log-likelihood": -9.25}'


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_pickle(path: Path, unit: str = "nats") -> VectorFile:
    """{"org/name": vector, …}.  Raises Unsupported for anything in the pickle that is not data."""
    content = pickled.read(path)
    if not isinstance(content, dict) or not content:
        raise Unsupported(f"{path} holds a {type(content).__name__}, not a dict of vectors by model name")
    rows: list[FileRow] = []
    for name, value in content.items():
        vector = _vector(value)
        if not isinstance(name, str) or vector is None:
            raise Unsupported(f"{path}: the entry {name!r:.80} is not a name with a vector of numbers")
        if rows and len(vector) != len(rows[0].values):
            raise BadInput(
                f"{path}: {name!r} has {len(vector)} values, {rows[0].name!r} has {len(rows[0].values)}",
                hint="all vectors of a file are on the same texts",
            )
        rows.append(foreign_row(name, vector))
    heading = Heading(FileTexts(len(rows[0].values)), unit)
    return checked(VectorFile("modelmap-pickle", (path.name,), file_sha256([path]), heading, tuple(rows)))


def _vector(value: Any) -> Any:
    if isinstance(value, pickled.PickledArray):
        value = value.value
        if value is None or value.ndim != 1 or value.dtype.kind not in "fiu" or not value.size:
            return None
        return value
    if isinstance(value, (list, tuple)) and value and all(_is_number(one) for one in value):
        try:
            return np.array([float(one) for one in value])
        except OverflowError:
            return None
    return None
