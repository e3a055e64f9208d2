"""What is asked about processes that somebody else started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from registry.errors import Busy
from registry.localdb.processes import alive, file_lock, works_in

from .conftest import PATH_OF_CHILDREN


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    """In a container whose first process reaps nobody, a killed server stays listed for good."""
    child = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    assert alive(child.pid)
    assert works_in(child.pid, tmp_path)
    assert not works_in(child.pid, tmp_path.parent)
    child.kill()
    deadline = time.monotonic() + 10
    while alive(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not works_in(child.pid, tmp_path)
    child.wait()
    assert not alive(child.pid)


def test_a_lock_is_waited_for_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = """
import sys, time
from pathlib import Path
from registry.localdb.processes import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=PATH_OF_CHILDREN
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(Busy, match="another process"), file_lock(path, seconds=0.2):
        pass
    holder.kill()
    holder.communicate()
    with file_lock(path, seconds=5):
        pass
