"""What importing costs and may pull in: promises to everybody who starts a command."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "scipy", "sklearn", "pyarrow", "huggingface_hub", "celery")


def modules_after(statement: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in shown.stdout.split()}


@pytest.mark.parametrize("statement", ["import registry", "import api.cli; api.cli._app()"])
def test_light_imports_stay_light(statement):
    assert modules_after(statement).isdisjoint(HEAVY)


def test_registry_works_where_torch_cannot_be_imported():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'celery', 'huggingface_hub']))\n"
        "import pkgutil, importlib, registry\n"
        "for found in pkgutil.walk_packages(registry.__path__, 'registry.'):\n"
        "    if '_migrations' not in found.name: importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_api_imports_where_torch_cannot_be_imported():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']))\n"
        "import pkgutil, importlib, api\n"
        "for found in pkgutil.walk_packages(api.__path__, 'api.'): importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
