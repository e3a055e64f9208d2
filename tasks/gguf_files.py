"""GGUF: read the header in a moment, turn the weights into a safetensors folder once.

transformers parses a GGUF file in Python, twice, for minutes; the folder loads in seconds.
"""

from __future__ import annotations

import fcntl
import importlib
import mmap
import os
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.canonical import sha256_hex
from registry.errors import NoSpace, Refused
from tasks.quiet import quiet

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]
    """Scalars and strings; of an array only its length."""
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, int]
    """Tensor → GGML type number."""

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture") or "")

    @property
    def parameters(self) -> int:
        total = 0
        for shape in self.shapes.values():
            count = 1
            for side in shape:
                count *= side
            total += count
        return total


def read_header(path: Path) -> Header:
    """Raises Refused("bad_weights") when the file is no whole GGUF file of version 2 or 3."""
    with path.open("rb") as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(data)
        except (ValueError, KeyError, struct.error, UnicodeDecodeError, OverflowError) as error:
            raise Refused(
                "bad_weights", f"{path} is not a whole GGUF file: {error}", hint="copy or download it again"
            ) from error


def columns(header: Header, where: str, size: int) -> dict[str, Any]:
    """Values for the fact columns of `models`.  Raises Refused("unsupported_architecture")."""
    known, head = check_architecture(header.architecture, where)
    template = header.fields.get("tokenizer.chat_template")
    return {
        "architecture": head,
        "model_type": known,
        "parameters": header.parameters,
        "quantization": quantization(header),
        "vocabulary": header.fields.get(f"{known}.vocab_size") or header.fields.get("tokenizer.ggml.tokens"),
        "context_length": header.fields.get(f"{known}.context_length"),
        "licence": header.fields.get("general.license"),
        "template_hash": sha256_hex(template) if isinstance(template, str) else None,
        "size_bytes": size,
    }


def check_architecture(architecture: str, where: str) -> tuple[str, str]:
    """(GGUF architecture, transformers' class name).  Raises Refused("unsupported_architecture")."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    readable: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils").GGUF_SUPPORTED_ARCHITECTURES
    heads = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # A GGUF file holds the text part alone.
    head = heads.get(f"{architecture}_text") or heads.get(architecture)
    if architecture not in readable or head is None:
        raise Refused(
            "unsupported_architecture",
            f"transformers cannot read GGUF files of the architecture {architecture!r} ({where})",
            hint="register the safetensors model that it was made from",
        )
    return architecture, str(head)


def quantization(header: Header) -> str:
    """`Q4_K_M` and the like, as the file states it, else the type that holds most values."""
    import gguf

    stated = header.fields.get("general.file_type")
    if isinstance(stated, int) and stated in set(gguf.LlamaFileType):
        return gguf.LlamaFileType(stated).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    sizes: dict[int, int] = {}
    for name, kind in header.types.items():
        count = 1
        for side in header.shapes[name]:
            count *= side
        sizes[kind] = sizes.get(kind, 0) + count
    return gguf.GGMLQuantizationType(max(sizes, key=lambda kind: sizes[kind])).name


def converted(path: Path, sha256: str, home: Path) -> Path:
    """The safetensors folder of a GGUF file: float32, so that the dequantised values are exact.

    Made once under `home/converted/<sha256>`; a kill on the way leaves nothing that could be taken for it, and a
    second process waits for the first.  Raises NoSpace, Refused("bad_weights" or "missing_backend").
    """
    place = home / "converted"
    target = place / sha256
    if target.is_dir():
        return target
    place.mkdir(parents=True, exist_ok=True)
    with (place / f".{sha256}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for left_over in place.glob(f".{sha256}-*"):
            shutil.rmtree(left_over)
        needed = read_header(path).parameters * 4
        if needed + 2**20 > shutil.disk_usage(place).free:
            raise NoSpace(
                f"{path.name} needs {needed / 1e9:.1f} GB in {place} when unpacked", hint="free some space there"
            )
        sys.stderr.write(f"modelkin: unpacking {path.name}, once; this can take minutes\n")
        staging = Path(tempfile.mkdtemp(prefix=f".{sha256}-", dir=place))
        try:
            with quiet():
                _convert(path, staging)
            for written in staging.iterdir():
                _sync(written)
            staging.chmod(0o755)
            os.replace(staging, target)
            _sync(place)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert(path: Path, out: Path) -> None:
    import copy

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise Refused("missing_backend", f"{path.name}: {error}", hint="pip install gguf accelerate") from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise Refused(
            "bad_weights", f"transformers cannot read {path.name}: {error}", hint="register the safetensors model"
        ) from error
    # save_pretrained raises on a model loaded from GGUF, so the weights move into a plain one of the same class.
    # On the meta device it costs no memory, and whatever is not in the state dict is not saved either.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(data: mmap.mmap) -> Header:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    at, fields = 24, {}
    for _ in range(pairs):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        fields[key], at = _value(data, at + 4, kind)
    shapes, types, end = {}, {}, 0
    for _ in range(tensors):
        name, at = _string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        shapes[name] = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
        types[name], offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        end = max(end, offset + _tensor_bytes(shapes[name], types[name]))
    alignment = int(fields.get("general.alignment") or 32)
    begin = -(-at // alignment) * alignment
    if begin + end > len(data):
        raise ValueError(f"the header promises {begin + end} bytes, the file has {len(data)}")
    return Header(fields, shapes, types)


def _tensor_bytes(shape: tuple[int, ...], kind: int) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    count = 1
    for side in shape:
        count *= side
    return int(count // block * size)


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    if at + 8 + length > len(data):
        raise ValueError("a string runs past the end")
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind in _SCALARS:
        (value,) = struct.unpack_from("<" + _SCALARS[kind], data, at)
        return value, at + struct.calcsize("<" + _SCALARS[kind])
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        raise ValueError(f"value type {kind}")
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SCALARS:
        return count, at + count * struct.calcsize("<" + _SCALARS[inner])
    for _ in range(count):
        if inner == _STRING:
            (length,) = struct.unpack_from("<Q", data, at)
            at += 8 + length
        else:
            _, at = _value(data, at, inner)
    return count, at
