"""`modelkin vectors`: log-likelihood vectors in and out of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.output import Format, counted, emit, emit_record, next_command, talk

app = typer.Typer(no_args_is_help=True, help="Log-likelihood vectors in and out of files.")

Unconditional = Annotated[bool, typer.Option("--unconditional", help="The transform `empty`: log p(response).")]
FormatOption = Annotated[Format, typer.Option("--format", help="Of the answer.")]


@app.command("export")
def export(
    text_set: Annotated[str, typer.Option("--text-set", help="A name, or the first digits of a content hash.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="FILE.npz or FILE.parquet.")],
    transform: Annotated[str, typer.Option("--transform", help="Prompt transform.")] = "base",
    unconditional: Unconditional = False,
    profile: Annotated[
        str | None, typer.Option("--profile", help="chat, plain, or an import's; by default the only one there.")
    ] = None,
    unit: Annotated[str | None, typer.Option("--unit", help="nats or bits_per_byte; by default the only one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    format: FormatOption = Format.auto,
) -> None:
    """Write the vectors of one text set to a file.

    Those of one transform, one vector a model, as .npz or .parquet.
    """
    from registry import database
    from registry.queries.vector_export import export_vectors

    with database.session() as session:
        done = export_vectors(
            session,
            out,
            text_set=text_set,
            transform="empty" if unconditional else transform,
            profile=profile,
            unit=unit,
            force=force,
        )
    # The key of the space is for programs.
    hidden = {"space"} if format in (Format.auto, Format.table) else set()
    emit_record({key: value for key, value in vars(done).items() if key not in hidden}, format)
    next_command("modelkin", "vectors", "import", done.file)


@app.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help=".npz, .parquet, modelmap's .jsonl (or a folder of them) or .pkl."),
    ],
    text_set: Annotated[
        str | None, typer.Option("--text-set", help="Names the texts, where the file does not or they are unknown.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="WHO", help="Who made the numbers; by default the file's name.")
    ] = None,
    transform: Annotated[
        str | None, typer.Option("--transform", help="What was done to the prompts; by default base.")
    ] = None,
    unconditional: Unconditional = False,
    unit: Annotated[str, typer.Option("--unit", help="nats or bits_per_byte, where the file does not say.")] = "nats",
    values_key: Annotated[
        str | None, typer.Option("--values-key", help="The array or column [models × texts].")
    ] = None,
    models_key: Annotated[str | None, typer.Option("--models-key", help="The array or column of names.")] = None,
    texts_key: Annotated[str | None, typer.Option("--texts-key", help="The array or column of text ids.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, store nothing.")] = False,
    format: FormatOption = Format.auto,
) -> None:
    """Store the vectors of files: all or none.

    modelkin's own exports say what they hold.  A matrix of somebody else's is `models` (names), `values` [models ×
    texts] and perhaps `texts` (ids): name other arrays with --models-key, --values-key and --texts-key.  Imported
    vectors never replace scored ones, and are compared with them only where an export proves to be of the same texts.
    """
    from registry import database
    from registry.exchange.vector_file import Keys
    from registry.exchange.vector_formats import open_vectors
    from registry.queries.vector_import import import_vectors

    parsed = open_vectors(files, Keys(values=values_key, models=models_key, texts=texts_key, unit=unit))
    if unconditional:
        transform = "empty"
    with database.session() as session:
        answers = [
            import_vectors(session, file, source=source, text_set=text_set, transform=transform) for file in parsed
        ]
        if dry_run:
            session.rollback()
    for answer in answers:
        _say(answer, dry_run)
    rows = [{"file": ", ".join(one.files[:3]) + (", …" if len(one.files) > 3 else ""), **vars(one)} for one in answers]
    columns = ["file", "text_set", "transform", "profile", "models", "added", "already_there", "new_names"]
    emit(rows, columns, format)
    if not dry_run:
        one = answers[-1]
        next_command("modelkin", "nearest", one.first, "--text-set", one.text_set, *_point(one))


def _say(answer: Any, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    where = answer.files[0] if len(answer.files) == 1 else f"{len(answer.files)} files"
    if not answer.added:
        talk(f"{where}: nothing new, all {answer.models} vectors are stored already")
    else:
        talk(f"{where}: {answer.added} of {answer.models} vectors {would}added, {answer.already_there} stored already")
    if answer.not_scored or answer.non_finite:
        talk(f"entries without a value: {answer.not_scored} missing, {answer.non_finite} infinite")
    named = answer.models - answer.attached
    if named:
        known = counted(named, "model is", "models are")
        talk(f"{known} known by name only; say which they are: modelkin model resolve NAME org/repo@commit")
    if answer.opaque:
        talk(f"the texts of {answer.text_set} are not known here: nothing can be scored on it")


def _point(answer: Any) -> list[str]:
    words = [] if answer.transform == "base" else ["--transform", answer.transform]
    return [*words, "--profile", answer.profile]
