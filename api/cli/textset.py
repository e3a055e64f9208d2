"""`modelkin textset`: frozen lists of prompts and responses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.output import Format, emit, emit_record, next_command, talk

app = typer.Typer(no_args_is_help=True, help="Text sets: frozen lists of prompts and responses.")

SHOWN_LETTERS = 120
"""Of a text, where a person reads; JSON has the whole."""

FormatOption = Annotated[Format, typer.Option("--format", help="Of the answer.")]


@app.command()
def add(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="FILE.jsonl or FILE.parquet, or `starter` for the bundled set.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="Its name; by default the file's.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Draw this many texts without replacement.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw.")] = 0,
    prompt_field: Annotated[str | None, typer.Option("--prompt-field", help="a.b reaches into objects.")] = None,
    response_field: Annotated[str | None, typer.Option("--response-field", help="a.b reaches into objects.")] = None,
    messages_field: Annotated[
        str | None,
        typer.Option(
            "--messages-field", help="A conversation: its first user turn and the first assistant turn after it."
        ),
    ] = None,
    keep_whitespace: Annotated[
        bool, typer.Option("--keep-whitespace", help="Keep the outer whitespace of responses.")
    ] = False,
    format: FormatOption = Format.auto,
) -> None:
    """Freeze a file of prompts and responses into a text set.

    Every row left out or altered is reported by number; the whole report is kept with the set.  Content that is known
    already only gets the name as one more: the answer reports this file, the set keeps the report that it has.
    """
    from registry import database
    from registry.exchange.text_rows import open_rows
    from registry.queries import textsets
    from registry.textsets import check_name, freeze

    if source == textsets.STARTER and not Path(source).exists():
        with database.session() as session:
            info = textsets.ensure_starter(session)
        _added(info, format)
        return
    chosen = name or _name_of(source)
    check_name(chosen)
    rows = open_rows(source, prompt_field=prompt_field, response_field=response_field, messages_field=messages_field)
    talk(f"read as {rows.format}: {rows.layout}")
    frozen = freeze(rows, keep_whitespace=keep_whitespace, n=n, seed=seed)
    for sentence in frozen.report.sentences():
        talk(sentence)
    source_of_file = {**rows.provenance(), **({"n": n, "seed": seed} if n is not None else {})}
    with database.session() as session:
        known = textsets.is_known(session, frozen.content_hash)
        info = textsets.add(session, chosen, frozen, source=source_of_file)
    if known:
        talk(f"this content was known already; `modelkin textset show {info.name}` has the report kept with it")
        info = dataclasses.replace(info, source={**source_of_file, "report": frozen.report.to_dict()})
    if len(info.names) > 1:
        talk(f"this content is one set with the names {', '.join(info.names)}")
    _added(info, format, known=known)


@app.command("list")
def list_(format: FormatOption = Format.auto) -> None:
    """List the text sets."""
    from registry import database
    from registry.queries import textsets

    with database.session() as session:
        rows = [_row(info) for info in textsets.list_all(session)]
    emit(
        rows,
        ["name", "texts", "prompts", "opaque", "hash", "aliases"],
        format,
        empty="no text sets yet; `modelkin textset add starter` adds the bundled one",
    )
    if rows:
        next_command("modelkin", "textset", "show", rows[-1]["name"])


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name, a content hash or its first eight digits.")],
    texts: Annotated[int, typer.Option("--texts", min=0, help="Also the first texts.")] = 3,
    format: FormatOption = Format.auto,
) -> None:
    """Show one text set.

    Identity, where it came from, its report and its first texts.
    """
    from registry import database
    from registry.queries import textsets

    with database.session() as session:
        info = textsets.get(session, name)
        parent = textsets.by_id(session, info.parent_id).name if info.parent_id is not None else None
        derived = [one.name for one in textsets.derived(session, info.id)]
        first = textsets.texts(session, info.id, 0, texts)
    record = {
        **_row(info),
        "parent": parent,
        "derivation": info.derivation,
        "derived": derived,
        **_source(info, format),
        "created_at": info.created_at,
    }
    if format in (Format.auto, Format.table):
        emit_record(record, format, below=[line for text in first for line in _preview(text)])
    else:
        emit_record({**record, "first_texts": [_text_row(text, format) for text in first]}, format)
    if info.opaque:
        next_command("modelkin", "vectors", "import", "FILE")
    else:
        next_command("modelkin", "score", "MODEL", "--text-set", info.name)


@app.command()
def derive(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The set to derive from.")],
    shuffle_prompts: Annotated[
        int, typer.Option("--shuffle-prompts", min=1, help="How many sets with shuffled prompts.")
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the shuffles.")] = 0,
    format: FormatOption = Format.auto,
) -> None:
    """Derive sets with shuffled prompts.

    Every response gets another row's prompt; the shuffles are the same for all models.
    """
    from registry import database
    from registry.queries import textsets

    with database.session() as session:
        infos = textsets.derive_shuffled(session, name, shuffle_prompts, seed)
    distinct = len({info.id for info in infos})
    if distinct < len(infos):
        talk(f"only {distinct} of the {len(infos)} shuffles differ: the set is small")
    emit([_row(info) for info in infos], ["name", "texts", "prompts", "hash"], format)
    next_command("modelkin", "score", "MODEL", "--text-set", infos[0].name)


def _added(info: Any, format: Format, *, known: bool = False) -> None:
    emit_record({**_row(info), "known_already": known, **_source(info, format)}, format)
    next_command("modelkin", "score", "MODEL", "--text-set", info.name)


def _row(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "aliases": [name for name in info.names if name != info.name],
        "texts": info.n_texts,
        "prompts": info.n_prompts,
        "opaque": info.opaque,
        "hash": info.content_hash,
    }


def _source(info: Any, format: Format) -> dict[str, Any]:
    """Where the set came from: whole in JSON, in sentences for a person."""
    if format is Format.json:
        return {"source": info.source}
    source = dict(info.source)
    report = source.pop("report", None)
    if format in (Format.auto, Format.table):
        return {"source": _in_words(source), **_report_of(report)}
    return {"source": source, **_report_of(report)}


def _report_of(report: dict[str, Any] | None) -> dict[str, Any]:
    from registry.textsets import report_sentences

    return {"report": "; ".join(report_sentences(report)) if report else None}


def _in_words(source: dict[str, Any]) -> str:
    """The file and how it was read, or whatever else is known of where the set came from."""
    known = {name: value for name, value in source.items() if name != "sha256"}
    words = [str(known.pop("file"))] if "file" in known else []
    if "layout" in known:
        words.append(f"({known.pop('format', 'read')}: {known.pop('layout')})")
    if "n" in known and "seed" in known:
        words.append(f"{known.pop('n')} drawn with seed {known.pop('seed')}")
    return " ".join([*words, *(f"{name} {value}" for name, value in known.items())])


def _preview(text: Any) -> list[str]:
    """A line break inside is shown as ⏎: one text stays one pair of lines."""
    prompt, response = (
        "⏎".join((_shown(one, Format.table) or "").splitlines()) for one in (text.prompt, text.response)
    )
    return ["", f"  {text.position}  {prompt}", f"     → {response}"]


def _text_row(text: Any, format: Format) -> dict[str, Any]:
    return {
        "position": text.position,
        "prompt": _shown(text.prompt, format),
        "response": _shown(text.response, format),
        "source_id": text.source_id,
        "tags": text.tags,
    }


def _shown(text: str | None, format: Format) -> str | None:
    if text is None or format is Format.json or len(text) <= SHOWN_LETTERS:
        return text
    return text[:SHOWN_LETTERS] + "…"


def _name_of(source: str) -> str:
    """The file's name without its ending, with what no name may hold replaced."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(source).stem).strip("-") or source
