"""`modelkin score`: log-likelihoods of a text set under transforms, for one or many models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.output import Format, emit, next_command, talk

if TYPE_CHECKING:
    from registry.errors import ModelkinError


def score(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL…", help="Handles, aliases, or anything `model add` takes.")
    ],
    text_set: Annotated[str, typer.Option("--text-set", help="Name of the text set.")] = "starter",
    transforms: Annotated[str, typer.Option(help="Comma-separated prompt transforms.")] = "base",
    unconditional: Annotated[
        bool, typer.Option("--unconditional", help="Also log p(response): the transform `empty`.")
    ] = False,
    profile: Annotated[str, typer.Option(help="chat (own template) or plain.")] = "chat",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens a forward pass; by default chosen for the device.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for another worker on the same model instead of leaving.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only estimate time, memory and disk; nothing is downloaded.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", help="Of the summary.")] = Format.auto,
) -> None:
    """Score models on a text set.

    The same command goes on after an interruption.
    """
    names = [name.strip() for name in transforms.split(",") if name.strip()] + (["empty"] if unconditional else [])
    if plan:
        _plan(models, text_set, names, device, dtype, format)
        return
    score_models(
        models,
        text_set=text_set,
        transforms=names,
        profile=profile,
        device=device,
        dtype=dtype,
        batch_tokens=batch_tokens,
        wait=wait,
        format=format,
    )


def score_models(
    models: list[str],
    *,
    text_set: str,
    transforms: list[str],
    profile: str,
    device: str,
    dtype: str,
    batch_tokens: int | None = None,
    wait: bool = False,
    format: Format = Format.auto,
) -> None:
    """Scores each model in turn; one that cannot be scored is reported and the others go on."""
    from api.cli.model import find_or_add
    from api.cli.progress import progress
    from registry.errors import ModelkinError
    from tasks import jobs
    from tasks.devices import chosen_dtype

    dtype = chosen_dtype(dtype, device)
    rows: list[dict[str, Any]] = []
    worst = None
    for name in models:
        try:
            model = find_or_add(name)
            with progress(model.handle) as report:
                outcome = jobs.score_model(
                    model,
                    text_set,
                    transforms,
                    profile,
                    dtype,
                    device=device,
                    progress=report,
                    batch_tokens=batch_tokens,
                    wait=wait,
                )
            if not outcome.scored:
                talk(f"{model.handle}: already scored ({', '.join(outcome.already)})")
            rows.append(
                {
                    "model": model.handle,
                    "revision": model.revision[:12],
                    "text_set": text_set,
                    "profile": profile,
                    "scored": ",".join(outcome.scored),
                    "already": ",".join(outcome.already),
                    "texts": outcome.n_texts or None,
                    "seconds": round(outcome.seconds, 1) if outcome.scored else None,
                    "tokens": outcome.tokens if outcome.scored else None,
                    **outcome.statuses,
                }
            )
        except ModelkinError as error:
            if len(models) == 1 or _stops_all(error):
                raise
            _report(name, error)
            rows.append({"model": name, "error": error.message})
            worst = error
    shown = ["model", "revision", "scored", "already", "texts", "seconds", "tokens"]
    statuses = [one for one in _STATUS_COLUMNS if any(row.get(one) for row in rows)]
    emit(rows, shown + statuses + (["error"] if worst else []), format)
    scored = [row["model"] for row in rows if "error" not in row]
    if scored:
        next_command("modelkin", "nearest", scored[0], "--text-set", text_set, *_unless("chat", "--profile", profile))
    if worst is not None:
        raise typer.Exit(worst.exit_code)


_STATUS_COLUMNS = ("ok", "split", "too_long", "non_finite", "template_error", "unalignable", "not_scored")


def _unless(usual: str, option: str, value: str) -> list[str]:
    return [] if value == usual else [option, value]


def _plan(models: list[str], text_set: str, transforms: list[str], device: str, dtype: str, format: Format) -> None:
    """Of each model in turn; one of which nothing can be known is reported and the others go on."""
    from registry.errors import ModelkinError
    from tasks import planning
    from tasks.devices import chosen_dtype

    dtype = chosen_dtype(dtype, device)
    rows: list[dict[str, Any]] = []
    worst = None
    for name in models:
        try:
            rows.append(planning.plan(name, text_set, transforms, device=device, dtype=dtype).as_row())
        except ModelkinError as error:
            if len(models) == 1 or _stops_all(error):
                raise
            _report(name, error)
            rows.append({"model": name, "error": error.message})
            worst = error
    shown = next((list(row) for row in rows if "error" not in row), ["model"])
    emit(rows, shown + (["error"] if worst else []), format)
    if worst is not None:
        raise typer.Exit(worst.exit_code)


def _stops_all(error: ModelkinError) -> bool:
    return error.slug == "database-unavailable"


def _report(name: str, error: ModelkinError) -> None:
    talk(f"{name}: {error.message}" + (f"\n  hint: {error.hint}" if error.hint else ""))
