"""Runs `modelkin` as a person would, in a home of its own, and shows what is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OTHERS = ("DATABASE_URL", "MODELKIN_DATABASE_URL", "BROKER_URL", "MODELKIN_BROKER_URL")
"""The demo must not write into a database that somebody works with."""


class DemoFailed(Exception):
    """Something did not go as the demo promises; the message says what."""


class Modelkin:
    """The command, with its home in `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
        self.environment |= {
            "MODELKIN_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # On a busy machine a thread that spins while it waits takes the core from the one it waits for: 3 × slower.
        self.environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if not sys.stderr.isatty():
            self.environment["TQDM_DISABLE"] = "1"
        # What the demo does in its own process has to see the same home.
        os.environ.clear()
        os.environ.update(self.environment)
        beside = Path(sys.executable).with_name("modelkin")
        self._command = [str(beside)] if beside.exists() else [sys.executable, "-c", "from api.cli import main; main()"]

    def run(self, *words: str | Path, shown: str | None = None, expect: int = 0) -> None:
        """Runs one command with its output on the screen; `shown` is a shorter spelling of the same.

        Raises DemoFailed unless it ends with the exit code `expect`.
        """
        spelling = shown or " ".join(short(word) for word in words)
        print(f"\n$ modelkin {spelling}", flush=True)
        ended = subprocess.run([*self._command, *map(str, words)], env=self.environment, check=False)
        if ended.returncode != expect:
            raise DemoFailed(f"`modelkin {spelling}` ended with exit code {ended.returncode}, not {expect}")


def short(word: str | Path) -> str:
    """A path as a person in this folder would type it."""
    if isinstance(word, Path) and word.is_absolute() and word.is_relative_to(Path.cwd()):
        return str(word.relative_to(Path.cwd()))
    return str(word)
