"""A built wheel carries all that `modelkin init` needs, the migrations and the starter set included."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_wheel_outside_the_clone_migrates_a_database(tmp_path, modelkin_env):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    # Ahead of the checkout on the path; isolated from the current folder.
    env = {**modelkin_env, "PYTHONPATH": str(unpacked)}
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import registry.database as d; print(d.migrations_folder())"],
        env=env,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(unpacked)
    init = subprocess.run(
        [sys.executable, "-P", "-c", "from api.cli import main; main()", "init"],
        env=env,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert init.returncode == 0, init.stderr
    listed = subprocess.run(
        [sys.executable, "-P", "-c", "from api.cli import main; main()", "textset", "show", "starter"],
        env=env,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0, listed.stderr
