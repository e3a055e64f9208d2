"""`modelkin model …`: register, name, find and list models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.output import Format, emit, emit_record, jsonable, next_command, talk

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from registry.queries.models import ModelInfo

app = typer.Typer(no_args_is_help=True, help="Register models, name them, look them up.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Handle, handle@revision, alias or path.")]
Output = Annotated[Format, typer.Option("--format", help="auto, table, json, csv, quiet.")]

_LISTED = ("model", "revision", "kind", "architecture", "parameters", "quantization", "licence", "status", "tags")


@app.command()
def add(
    reference: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="org/name[@rev][:FILE.gguf], a Hub URL, ./folder or ./file.gguf."),
    ],
    name: Annotated[str | None, typer.Option("--as", help="Handle of a local model; alias of a Hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let this commit's own code run; read it first.")
    ] = False,
    base: Annotated[
        str | None, typer.Option("--base", help="The model an adapter adapts, where it does not say so well.")
    ] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="A free label; may be repeated.")] = None,
    score: Annotated[bool, typer.Option("--score", help="Score it right away.")] = False,
    text_set: Annotated[str, typer.Option("--text-set", help="For --score.")] = "starter",
    transforms: Annotated[str, typer.Option(help="For --score, comma-separated.")] = "base",
    profile: Annotated[str, typer.Option(help="For --score: chat or plain.")] = "chat",
    device: Annotated[str, typer.Option(help="For --score.")] = "auto",
    dtype: Annotated[str, typer.Option(help="For --score.")] = "auto",
    format: Output = Format.auto,
) -> None:
    """Register a model.  Its facts are read; its weights are not downloaded before they are needed."""
    model = _register(reference, name, trust_remote_code=trust_remote_code, base=base, tags=tags or [])
    chosen = model.name if model.file else model.handle
    if score:
        from api.cli.score import score_models

        names = [each.strip() for each in transforms.split(",") if each.strip()]
        score_models(
            [model.name],
            text_set=text_set,
            transforms=names,
            profile=profile,
            device=device,
            dtype=dtype,
            format=format,
        )
        return
    emit_record(_record(model), format)
    next_command("modelkin", "score", chosen, *([] if model.template_hash else ["--profile", "plain"]))


@app.command("list")
def list_(
    search: Annotated[str | None, typer.Argument(help="Part of a handle or alias.")] = None,
    architecture: Annotated[str | None, typer.Option(help="e.g. LlamaForCausalLM, or the model type: llama.")] = None,
    min_parameters: Annotated[str | None, typer.Option(help="e.g. 1e9, 500M, 7B.")] = None,
    max_parameters: Annotated[str | None, typer.Option(help="e.g. 8B.")] = None,
    licence: Annotated[str | None, typer.Option("--licence", "--license", help="e.g. apache-2.0.")] = None,
    base_model: Annotated[str | None, typer.Option(help="As the card declares it.")] = None,
    status: Annotated[str | None, typer.Option(help="active, unstable, retired.")] = None,
    kind: Annotated[str | None, typer.Option(help="hub, folder, gguf, adapter, endpoint, named.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only models with this tag.")] = None,
    has_vectors_for: Annotated[str | None, typer.Option(help="Name of a text set.")] = None,
    limit: Annotated[int, typer.Option(help="Models a page.")] = 100,
    after: Annotated[str | None, typer.Option(help="The `next` of the page before.")] = None,
    format: Output = Format.auto,
) -> None:
    """List registered models, newest first."""
    from registry import database
    from registry.queries import model_names, models, textsets

    with database.session() as session:
        text_set = textsets.get(session, has_vectors_for).id if has_vectors_for is not None else None
        page = models.list_models(
            session,
            search=search,
            architecture=architecture,
            min_parameters=_count(min_parameters),
            max_parameters=_count(max_parameters),
            licence=licence,
            base_model=base_model,
            status=status,
            kind=kind,
            tag=tag,
            has_vectors_for=text_set,
            limit=limit,
            after=after,
        )
        tags = model_names.tags_of_many(session, [model.id for model in page.items])
    rows = [
        {
            **_fields(model),
            "model": model.handle + (f":{model.file}" if model.file else ""),
            "revision": model.revision[:12],
            "tags": tags.get(model.id, []),
        }
        for model in page.items
    ]
    emit(rows, _LISTED, format, payload={"items": rows, "next": page.next}, empty="no model fits")
    if page.next is not None and format is not Format.json:
        talk(f"more: repeat with --after {page.next}")
    elif not rows:
        next_command("modelkin", "model", "add", "org/name")


@app.command()
def show(model: Model, format: Output = Format.auto) -> None:
    """Show everything known of one model.

    Facts, names, other revisions, equal weights.
    """
    from registry import database
    from registry.queries import model_names, models

    with database.session() as session:
        found = models.find(session, model)
        record = _record(found)
        record["aliases"] = model_names.aliases(session, found.id)
        record["tags"] = model_names.tags_of(session, found.id)
        record["same_weights"] = [other.name for other in models.same_weights(session, found)]
        record["imported_as"] = [other.handle for other in model_names.names_resolved_to(session, found.id)]
        if found.base_id is not None:
            record["base"] = models.get(session, found.base_id).name
    say_which(model, found)
    if format is Format.json:
        record["facts"] = jsonable(found.facts)
    emit_record(record, format)


@app.command()
def alias(
    model: Model,
    name: Annotated[str | None, typer.Argument(metavar="ALIAS", help="Without it: the model's aliases.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away.")] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Where the alias has pointed; `alias ALIAS --history` will do.")
    ] = False,
    format: Output = Format.auto,
) -> None:
    """Give a model another name.  An alias can be moved to another model; every move is written down."""
    from registry import database
    from registry.queries import model_names, models

    with database.session() as session:
        if history:
            asked = [name] if name is not None else _aliases_meant(session, model)
            events = [event for each in asked for event in _alias_events(session, each)]
            columns = ("alias", "at", "actor", "from", "to")
            emit(events, columns, format, empty=f"nobody has used the alias {', '.join(asked) or model}")
            return
        found = models.find(session, model)
        if name is not None and remove:
            model_names.remove_alias(session, name, actor=_actor())
            talk(f"{name} is no alias any more")
        elif name is not None:
            before = model_names.set_alias(session, name, found.id, actor=_actor())
            if before is not None and before != found.id:
                talk(f"{name} pointed to {models.get(session, before).name} before")
        rows = [{"alias": each, "model": found.name} for each in model_names.aliases(session, found.id)]
    emit(rows, ("alias", "model"), format, empty=f"{found.name} has no aliases")


def _aliases_meant(session: Session, text: str) -> list[str]:
    """`text` itself where it was ever an alias, also a removed one; else the aliases of the model that it means."""
    from registry.queries import model_names, models

    if model_names.alias_history(session, text):
        return [text]
    return model_names.aliases(session, models.find(session, text).id)


def _alias_events(session: Session, alias: str) -> list[dict[str, Any]]:
    """With the models by name: the ids of rows mean nothing to anybody."""
    from registry.queries import model_names, models

    def name(model_id: int | None) -> str | None:
        return None if model_id is None else models.get(session, model_id).name

    events = model_names.alias_history(session, alias)
    return [{**event, "alias": alias, "from": name(event["from"]), "to": name(event["to"])} for event in events]


@app.command()
def tag(
    model: Model,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG…", help="Without any: the model's tags.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags away.")] = False,
    format: Output = Format.auto,
) -> None:
    """Put free labels on a model; `model list --tag` finds them."""
    from registry import database
    from registry.queries import model_names, models

    with database.session() as session:
        found = models.find(session, model)
        change = model_names.remove_tags if remove else model_names.add_tags
        left = change(session, found.id, tags or [])
    emit([{"tag": each, "model": found.name} for each in left], ("tag", "model"), format, empty="no tags")


@app.command()
def resolve(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name known from an import.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What it is: registered, or org/repo@commit.")],
    move: Annotated[bool, typer.Option("--move", help="It was resolved to another model, wrongly.")] = False,
    format: Output = Format.auto,
) -> None:
    """Say which model an imported name is.  The name and its vectors are kept."""
    from registry import database
    from registry.queries import model_names

    # The name first: a misspelt one must not leave a model behind.
    with database.session() as session:
        model_names.find_named(session, name)
    target = find_or_add(model)
    with database.session() as session:
        named = model_names.find_named(session, name)
        done = model_names.resolve(session, named, target, actor=_actor(), move=move)
    emit_record({"name": done.handle, "model": target.name, "imported_from": done.source}, format)
    next_command("modelkin", "nearest", target.handle)


def find_or_add(text: str) -> ModelInfo:
    """The registered model that `text` means; one that is not registered yet is registered.

    A path is always read anew, since what lies there may have changed.
    """
    from registry import database
    from registry.errors import BadInput, ModelkinError, NotFound, Refused
    from registry.queries import models

    if not text.startswith((".", "/", "~", "http")):
        with database.session() as session:
            try:
                found = models.find(session, text)
            except NotFound as error:
                missing = error
            else:
                say_which(text, found)
                return found
        try:
            return _register(text, None)
        except (BadInput, Refused) as error:
            unknown = isinstance(error, BadInput) or error.reason == "not_found_or_private"
            # A misspelt name is more likely than a wish to register something that does not exist.
            raise (missing if unknown and "did you mean" in missing.message else error) from error
        except ModelkinError as error:
            if "did you mean" in missing.message:
                raise missing from error
            raise
    return _register(text, None)


def say_which(asked: str, model: ModelInfo) -> None:
    """On stderr, whenever what was typed left a choice."""
    if model.found_by == "resolved":
        talk(f"{asked} was resolved to {model.name}")
    elif model.found_by in ("alias", "ref", "source"):
        talk(f"{asked} is {model.name}")
    elif model.other_revisions:
        more = "revisions are" if model.other_revisions > 1 else "revision is"
        talk(f"{asked} means {model.name}, the newest; {model.other_revisions} other {more} registered")


def _register(
    reference: str,
    name: str | None,
    *,
    trust_remote_code: bool = False,
    base: str | None = None,
    tags: list[str] | None = None,
) -> ModelInfo:
    from registry import database
    from registry.queries import model_names, models
    from tasks import registration

    candidate = registration.candidate(reference, name, trust_remote_code=trust_remote_code, base=base)
    with database.session() as session:
        model, created = models.register(session, candidate)
        model_names.add_tags(session, model.id, tags or [])
        claimed = [
            (one, each)
            for one in (model, *([models.get(session, model.base_id)] if model.base_id is not None else []))
            for each in model_names.claim_names(session, one, actor=_actor())
        ]
        open_names = model_names.unresolved_twins(session, model)
        twins = models.same_weights(session, model) if created else []
    talk(f"registered {model.name}" if created else f"{model.name} was registered already")
    if model.handle.lower() != candidate.handle.lower():
        talk(f"{reference} has the same content as {model.handle}, so it is the same model")
    for other in twins:
        if other.handle.lower() != model.handle.lower():
            talk(f"note: {other.name} has the same weights")
    for owner, each in claimed:
        whose = "this model's" if owner.id == model.id else f"those of its base {owner.name}"
        talk(f"the vectors imported as {model_names.written(each)} are now {whose}")
    for each in open_names:
        talk(f"note: an import has named {model_names.written(each)} too; if that is this model:")
        next_command("modelkin", "model", "resolve", model_names.written(each), model.name)
    for warning in candidate.facts.get("warnings", []):
        talk(f"note: {warning}")
    return model


def _fields(model: ModelInfo) -> dict[str, Any]:
    names = (
        "kind handle source file status status_reason architecture model_type parameters dtype quantization vocabulary "
        "context_length licence base_model base_model_relation pipeline_tag gated downloads likes size_bytes "
        "template_hash weights_hash identity trust_remote_code facts_at created_at"
    )
    return {name: getattr(model, name) for name in names.split()}


def _record(model: ModelInfo) -> dict[str, Any]:
    return {"model": model.name, "revision": model.revision, **_fields(model)}


def _count(text: str | None) -> int | None:
    """500M, 7B, 1e9, 1_000_000.  Raises BadInput."""
    if text is None:
        return None
    from registry.errors import BadInput

    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return int(float(text[:-1] if scale else text) * (scale or 1))
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{text!r} is not a number of parameters", hint="write 500M, 7B or 1e9") from error


def _actor() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
