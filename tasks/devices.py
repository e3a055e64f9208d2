"""Which device and number format a run uses when nobody says."""

from __future__ import annotations

from registry.errors import BadInput

DTYPES = ("float32", "bfloat16", "float16")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def chosen_dtype(dtype: str, device: str) -> str:
    """`auto` is float32 on the CPU and bfloat16 on a card.  Raises BadInput for an unknown name."""
    dtype = _SHORT.get(dtype, dtype)
    if dtype == "auto":
        return "bfloat16" if chosen_device(device).startswith("cuda") else "float32"
    if dtype not in DTYPES:
        raise BadInput(f"there is no dtype {dtype!r}", hint="use one of: auto, " + ", ".join(DTYPES))
    return dtype


def chosen_device(device: str) -> str:
    """`auto` is the first card, else the CPU.  Raises BadInput for a device that is not there."""
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"there is no device {device!r}", hint="use auto, cpu, cuda or cuda:N") from error
    if parsed.type not in ("cpu", "cuda"):
        raise BadInput(f"nothing was tried on device {device!r}", hint="use auto, cpu, cuda or cuda:N")
    if parsed.type == "cuda" and (not torch.cuda.is_available() or (parsed.index or 0) >= torch.cuda.device_count()):
        raise BadInput(f"device {device!r} is not on this machine", hint="use --device cpu, or see `modelkin doctor`")
    return device
