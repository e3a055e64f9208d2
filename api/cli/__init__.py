"""The `modelkin` command: nouns, then verbs.  Each module here parses, asks one function and shapes the answer.

Exit codes: 0 well · 1 unexpected · 2 bad input or usage · 3 not found · 4 ambiguous or in conflict · 5 two spaces ·
6 model refused · 7 something outside does not answer · 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer
    from sqlalchemy.exc import DBAPIError


def main() -> None:
    """Entry point: runs the command and turns an error into one sentence, a hint and an exit code."""
    from registry.errors import ModelkinError

    try:
        _app()(standalone_mode=True)
    except ModelkinError as error:
        _fail(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; what was finished is kept", "run the same command again to go on", 130)
    except BrokenPipeError:
        # `modelkin … | head`: the reader has what it wanted.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        outside = _outside_error(error)
        if outside is None:
            raise
        _fail(*outside)


def _app() -> typer.Typer:
    import typer

    from api.cli import database, model, nearest, score, textset, transform, vectors
    from registry import __version__

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="A registry of language models that knows how they differ.",
    )

    def show_version(value: bool) -> None:
        if value:
            sys.stdout.write(f"modelkin {__version__}\n")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show it and exit."
        ),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No talk on stderr."),
    ) -> None:
        from api.cli.output import set_quiet

        set_quiet(quiet)

    app.command("init")(database.init)
    app.command("down")(database.down)
    app.command("doctor")(database.doctor)
    app.add_typer(textset.app, name="textset")
    app.add_typer(transform.app, name="transform")
    app.add_typer(model.app, name="model")
    app.command("score")(score.score)
    app.command("nearest")(nearest.nearest)
    app.add_typer(vectors.app, name="vectors")
    return app


def _outside_error(error: Exception) -> tuple[str, str, int] | None:
    """Errors of the disk and of the database that no code of ours foresaw at the place they arose."""
    import errno

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error}", "free some space and run the same command again", 7
    if isinstance(error, PermissionError):
        return f"not allowed: {error}", "check the owner and mode of that path", 7
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"no such file: {error.filename}", "check the path", 3
    if "sqlalchemy.exc" in sys.modules:
        from sqlalchemy.exc import DBAPIError

        if isinstance(error, DBAPIError):
            return _database_error(error)
    return None


def _database_error(error: DBAPIError) -> tuple[str, str, int]:
    """Without the statement and its parameters, which are of no use to whoever typed a command."""
    said = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    code = getattr(error.orig, "sqlstate", None) or ""
    if code == "53100":
        return f"the database's disk is full: {said}", "free some space; finished work was kept, run the same again", 7
    if code == "25006":
        return f"the database is read-only: {said}", "point DATABASE_URL to a server that may be written to", 7
    if error.connection_invalidated or code.startswith(("08", "57")) or not code:
        return f"the database went away: {said}", "run the same command again: finished work was kept", 7
    if code in ("42501", "28000", "28P01"):
        return f"the database does not allow it: {said}", "check the rights of the user in DATABASE_URL", 7
    if code in ("42P07", "42P01", "42703"):
        return (
            f"the database's tables are not modelkin's: {said}",
            "give modelkin a database of its own, or restore a backup of this one",
            4,
        )
    return f"the database refused: {said} ({code})", "if this looks like a fault of modelkin's, please report it", 1


def _fail(message: str, hint: str | None, code: int) -> None:
    sys.stderr.write(f"modelkin: {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    sys.exit(code)
