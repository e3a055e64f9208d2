"""B23: after an error of the card the process ends; after others it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.card_errors import EXIT_CODE, CardFailed, is_card_error, told_apart

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"

CHILD = """
import sys
from tasks import card_errors

def run(message):
    with card_errors.told_apart():
        raise RuntimeError(message)

with card_errors.ending_the_process():
    try:
        run(sys.argv[1])
    except ValueError:
        pass
    except RuntimeError as error:
        print("goes on:", error)
print("next model")
"""


def child(message: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", CHILD, message], cwd=root, capture_output=True, text=True, check=False)


def test_a_failed_card_ends_the_process_before_the_next_model() -> None:
    done = child(ASSERT)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")
    assert "device-side assert triggered; this process ends" in done.stderr
    other = child("shapes cannot be multiplied")
    assert (other.returncode, other.stdout) == (0, "goes on: shapes cannot be multiplied\nnext model\n")


@pytest.mark.parametrize(
    "message",
    [
        ASSERT,
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: unspecified launch failure",
    ],
)
def test_what_a_failed_card_says(message: str) -> None:
    with pytest.raises(CardFailed) as caught, told_apart():
        raise RuntimeError(message)
    assert message.splitlines()[0] in caught.value.message
    assert (caught.value.slug, caught.value.exit_code) == ("card-failed", 7)
    assert caught.value.hint


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error: said by something else"),
    ],
)
def test_what_it_does_not_say(error: Exception) -> None:
    assert not is_card_error(error)
    with pytest.raises(type(error)), told_apart():
        raise error


def test_the_class_of_torch_s_own() -> None:
    assert is_card_error(torch.AcceleratorError("something new"))
