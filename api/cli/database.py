"""`modelkin init`, `down` and `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.output import Format, emit, emit_record, next_command, talk

if TYPE_CHECKING:
    from api.cli.checks import Check

FormatOption = Annotated[Format, typer.Option("--format", help="How to write the answer.")]


def init(format: FormatOption = Format.auto) -> None:
    """Make the database, or bring it up to date.

    The embedded one, or DATABASE_URL's; to this version's schema.  Harmless to repeat.
    """
    from sqlalchemy import text

    from api.cli.checks import database_shown
    from registry import database
    from registry.queries import transforms

    engine = database.engine()
    before = database.current_revision(engine)
    database.migrate(engine)
    with database.session() as session:
        transforms.ensure_built_in(session)
        version = session.scalar(text("show server_version"))
    after = database.current_revision(engine)
    record = {
        "database": database_shown(engine.url),
        "server": f"PostgreSQL {version}",
        "migration": after,
        "migrated_from": before,
    }
    emit_record(record, format)
    talk("the schema was up to date" if before == after else f"the schema is at migration {after}")
    next_command("modelkin", "model", "add", "HuggingFaceTB/SmolLM2-135M-Instruct", "--score")


def down(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the embedded database for good.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    format: FormatOption = Format.auto,
) -> None:
    """Stop the embedded servers.

    Their data stays, and the next command starts them again; with --delete the registry itself goes.
    """
    from registry.localdb import remove, stop
    from registry.settings import settings

    home = settings().home
    if delete and not yes:
        typer.confirm(f"Delete the registry of {home}, all models, texts and vectors?", abort=True, err=True)
    stopped = stop(home)
    if format in (Format.auto, Format.table):
        for name in stopped:
            talk(f"stopped {name}")
        if not stopped:
            talk(f"nothing of {home} was running")
    else:
        emit([{"stopped": name} for name in stopped], ["stopped"], format, empty=f"nothing of {home} was running")
    if delete:
        remove(home)
        talk(f"deleted the registry of {home}; its caches may be deleted by hand")
    if settings().database_url:
        talk("DATABASE_URL is set: that server is not modelkin's to stop")


def doctor(format: FormatOption = Format.auto) -> None:
    """Check what modelkin needs on this machine.

    Versions, database, broker, device, Hub and disk; exit code 7 when something that is needed is broken.
    """
    from api.cli.checks import all_checks

    checks = all_checks()
    if format in (Format.auto, Format.table):
        emit([line for check in checks for line in _lines(check)], ["check", "state", "detail"], format)
    else:
        emit([vars(check) for check in checks], ["check", "state", "detail", "advice"], format)
    failed = [check.check for check in checks if check.state == "fail"]
    if failed:
        talk(f"to be mended: {', '.join(failed)}")
        raise typer.Exit(7)
    next_command("modelkin", "model", "list")


def _lines(check: Check) -> list[dict[str, str]]:
    """The advice has a line of its own: beside the detail both would be too narrow to read."""
    lines = [{"check": check.check, "state": check.state, "detail": check.detail}]
    return [*lines, {"detail": f"→ {check.advice}"}] if check.advice else lines
