"""`modelkin vectors …`: vectors in and out of files."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Vectors in and out of files.")


@app.callback()
def _group() -> None:
    """Vectors in and out of files."""
