"""`modelkin transform`: the edits that may be made to a prompt."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.output import Format, emit, emit_record, next_command, talk

app = typer.Typer(no_args_is_help=True, help="Prompt transforms: named pipelines of edits.")

FormatOption = Annotated[Format, typer.Option("--format", help="Of the answer.")]


@app.command("list")
def list_(format: FormatOption = Format.auto) -> None:
    """List the transforms."""
    from registry import database
    from registry.queries import transforms

    with database.session() as session:
        rows = [_row(info) for info in transforms.list_all(session)]
    emit(rows, ["name", "edits", "parts", "spec_hash"], format)
    next_command("modelkin", "transform", "show", rows[-1]["name"])


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the transform.")],
    prompt: Annotated[str, typer.Option(help="A prompt to show it on.")] = "Why is the sky blue?",
    format: FormatOption = Format.auto,
) -> None:
    """Show one transform, and what it makes of a prompt."""
    from registry import database
    from registry.queries import transforms

    with database.session() as session:
        info = transforms.get(session, name)
    edited = info.pipeline.apply(prompt)
    example = {"prompt": prompt, "system": edited.system, "user": edited.user}
    emit_record({**_row(info), "spec": info.spec, "example": example}, format)
    next_command("modelkin", "score", "MODEL", "--transforms", f"base,{name}" if name != "base" else name)


@app.command()
def add(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name; one with + must be composed of the names around it.")
    ],
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="Names joined by + (repeat+cot), edits as calls "
            '(repeat("\\n\\n", 2) + append("\\nBe brief.")), or a JSON list of edits. '
            "Edits: append(text), prepend(text), repeat(separator, times), wrap(before, after), system(text), clear().",
        ),
    ],
    format: FormatOption = Format.auto,
) -> None:
    """Add a transform of your own; it never changes afterwards."""
    from registry import database
    from registry.queries import transforms

    with database.session() as session:
        info = transforms.add(session, name, spec)
    talk(f"transform {info.name}: {len(info.spec)} edit{'s' if len(info.spec) != 1 else ''}")
    emit_record({**_row(info), "spec": info.spec}, format)
    next_command("modelkin", "transform", "show", info.name)


def _row(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "edits": [edit["edit"] for edit in info.spec],
        "parts": list(info.parts),
        "spec_hash": info.spec_hash,
    }
