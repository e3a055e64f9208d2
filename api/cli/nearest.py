"""`modelkin nearest`: which models behave most like this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.output import Format, counted, emit, next_command, talk

if TYPE_CHECKING:
    from registry.queries.nearest import Answer


FEW_RESAMPLES = 100
"""Fewer put the ends of a 95 % interval on two or three draws."""


def nearest(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Handle, handle@revision or alias.")],
    k: Annotated[int, typer.Option("-k", help="How many neighbours.")] = 10,
    text_set: Annotated[str | None, typer.Option("--text-set", help="By default the only one the model has.")] = None,
    transform: Annotated[str, typer.Option(help="Prompt transform.")] = "base",
    unconditional: Annotated[
        bool, typer.Option("--unconditional", help="The transform `empty`: log p(response).")
    ] = False,
    profile: Annotated[str | None, typer.Option(help="chat, plain, or an import's; by default the one it has.")] = None,
    among: Annotated[
        list[str] | None, typer.Option(help="Only these models; may be repeated or comma-separated.")
    ] = None,
    bootstrap: Annotated[int, typer.Option(metavar="B", help="Interval from B resamples of the texts.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    after: Annotated[str | None, typer.Option("--after", help="Go on there: the `next` of the answer before.")] = None,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Keep the evidence in the registry.")] = True,
    format: Annotated[Format, typer.Option("--format", help="auto, table, json, csv, quiet.")] = Format.auto,
) -> None:
    """Nearest models by estimated KL divergence.

    Each with a 95 % interval, and whether it is told apart from the next one.
    """
    from registry import database
    from registry.queries import evidence, models
    from registry.queries import nearest as question

    names = [name.strip() for one in among or [] for name in one.split(",") if name.strip()]
    with database.session() as session:
        found = models.find(session, model)
        answer = question.nearest(
            session,
            found,
            text_set=text_set,
            transform="empty" if unconditional else transform,
            profile=profile,
            k=k,
            after=after,
            among=[models.find(session, name) for name in names] if among else None,
            bootstrap=bootstrap,
            seed=seed,
        )
        if store:
            evidence.record(session, answer.items)
    talk(
        f"{found.name} on text set {answer.text_set}, transform {answer.transform}, profile {answer.profile}:"
        f" {counted(answer.candidates, 'other model')}"
    )
    if 0 < bootstrap < FEW_RESAMPLES:
        talk(f"an interval from {counted(bootstrap, 'resample')} is rough; take at least {FEW_RESAMPLES}")
    rows = [_row(item) for item in answer.items]
    columns = ["rank", "model", "revision", *(_KL if _is_kl(answer.items) else ["relative_squared_distance"]), "n"]
    columns += ["reason"] if any(row["reason"] for row in rows) else []
    if format is Format.quiet:
        columns = ["model"]
    emit(
        rows,
        columns,
        format,
        payload={"items": answer.items, "next": answer.next},
        empty="no other model is there",
        dispensable=["revision", "kl_bits_per_byte"],
    )
    if format not in (Format.auto, Format.table):
        return
    if rows:
        talk(_caption(answer.items))
    if answer.next is not None:
        asked = {"-k": k if k != 10 else None, "--text-set": text_set, "--profile": profile, "--seed": seed or None}
        asked |= {"--transform": None if unconditional or transform == "base" else transform}
        asked |= {"--among": ",".join(names) or None, "--bootstrap": bootstrap or None, "--after": answer.next}
        given = [word for name, value in asked.items() if value is not None for word in (name, str(value))]
        next_command("modelkin", "nearest", model, *(["--unconditional"] if unconditional else []), *given)
    elif not rows:
        next_command(*_another(answer))


_KL = ["kl_nats", "low", "high", "kl_bits_per_byte", "order"]


def _another(answer: Answer) -> list[str]:
    """The command that brings another model into the space of an answer without neighbours."""
    if answer.profile not in ("chat", "plain"):
        return ["modelkin", "vectors", "import", "FILE"]
    words = ["modelkin", "score", "org/another-model", "--text-set", answer.text_set]
    words += ["--transforms", answer.transform] if answer.transform != "base" else []
    return words + (["--profile", answer.profile] if answer.profile != "chat" else [])


def _is_kl(items: list[Any]) -> bool:
    return not items or items[0].statistic == "kl_nats"


def _row(item: Any) -> dict[str, Any]:
    resolved = item.details.get("resolved_from_next")
    return {
        "rank": item.details["rank"],
        "model": item.b.handle,
        "revision": item.b.revision[:12],
        item.statistic: item.value,
        "low": item.interval.low if item.interval else None,
        "high": item.interval.high if item.interval else None,
        "kl_bits_per_byte": item.details.get("kl_bits_per_byte"),
        "order": {True: "resolved", False: "not resolved", None: ""}[resolved],
        "n": item.n,
        "reason": item.reason,
    }


def _caption(items: list[Any]) -> str:
    """What the figures are, and what they do not show."""
    if not _is_kl(items):
        return f"relative squared distance of centred vectors: 0 equal, 2 unrelated; no KL here.  {items[0].not_shown}"
    return (
        "kl_nats: half the Jeffreys divergence in nats a text, 95 % interval, no values clipped;"
        f" order: whether it differs from the next one's.  {items[0].not_shown}"
    )
