"""Vectors of a file into the database: all of it or nothing, and never over what is there.

What comes from a file stands beside what was scored here: engine version 0, path `import:<format>`, the file named in
its provenance.  It joins a space that is in use here only if the file states that very space (our own formats) and its
texts are the same, hash by hash.  Everything else goes to a profile of its own, `imported:<who>`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.errors import BadInput, Conflict
from registry.exchange.vector_file import FileRow, FileTransform, VectorFile
from registry.queries import models, textsets, transforms, vectors
from registry.queries.textsets import TextSetInfo
from registry.queries.transforms import TransformInfo
from registry.queries.vectors import Floats, NewVector
from registry.spaces import log_likelihood_space
from registry.statuses import Status
from registry.tables import Model, Text, TextSet, Transform, Vector
from registry.textsets import content_hash
from registry.transforms import parse

IMPORT_ENGINE = 0
_WHO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}")
_PROFILE = re.compile(r"[a-z][A-Za-z0-9._+:-]{0,199}")


@dataclass(frozen=True)
class Imported:
    files: tuple[str, ...]
    format: str
    text_set: str
    opaque: bool
    transform: str
    profile: str
    unit: str
    space: str
    """The space key that the vectors are in."""
    models: int
    added: int
    already_there: int
    """Vectors that are stored with the same values."""
    attached: int
    """Models found here by their identity; the others are names."""
    new_names: int
    """Names that were not known before."""
    not_scored: int
    """Entries without a value, over all models."""
    non_finite: int
    first: str
    """The handle of one of the models."""


def import_vectors(
    session: Session,
    file: VectorFile,
    *,
    source: str | None = None,
    text_set: str | None = None,
    transform: str | None = None,
) -> Imported:
    """Stores what the file holds; a file imported before adds nothing.

    `source` is who made the numbers, `text_set` names texts that are not known here, `transform` (default `base`) is
    what had been done to the prompts; our own files say that themselves.  Raises Conflict where the database holds
    other values at the same point, another transform under the name or another text set, BadInput where the file
    does not say enough or two of its models are one here.  After an error the session is as it was before.
    """
    with session.begin_nested():
        edits = _transform(session, file, transform)
        texts, same = _text_set(session, file, text_set)
        profile = _profile(file, source, same)
        rows = [_padded(row, texts.n_texts) for row in file.rows]
        owners, new_names = _owners(session, file, rows, source)
        point = (texts.id, edits.id, profile)
        fresh = _fresh(session, point, file.heading.unit, owners, rows)
        # Asked for now: while vectors are copied in, the connection answers nothing else.
        lengths = textsets.response_byte_counts(session, texts.id)
        wanted = [pair for pair, new in zip(zip(rows, owners, strict=True), fresh, strict=True) if new]
        added = vectors.insert_many(session, (_new(file, point, *pair, lengths, source) for pair in wanted))
    counts = Counter({Status.NOT_SCORED: 0, Status.NON_FINITE: 0})
    for row in rows:
        counts.update({status: int((row.statuses == status).sum()) for status in counts})
    return Imported(
        files=file.names,
        format=file.format,
        text_set=texts.name,
        opaque=texts.opaque,
        transform=edits.name,
        profile=profile,
        unit=file.heading.unit,
        space=log_likelihood_space(texts.content_hash, profile, file.heading.unit).key,
        models=len(rows),
        added=added,
        already_there=len(rows) - added,
        attached=sum(owner.kind != "named" for owner in owners),
        new_names=new_names,
        not_scored=counts[Status.NOT_SCORED],
        non_finite=counts[Status.NON_FINITE],
        first=owners[0].handle,
    )


def _transform(session: Session, file: VectorFile, named: str | None) -> TransformInfo:
    stated = file.heading.transform
    if stated is None:
        return transforms.get(session, named or "base")
    if named is not None and named != stated.name:
        raise Conflict(
            f"{file.names[0]} says that its transform is {stated.name!r}, not {named!r}", hint="leave that option out"
        )
    for name, spec in stated.parts:
        _same_transform(session, FileTransform(name, spec))
    return _same_transform(session, stated)


def _same_transform(session: Session, stated: FileTransform) -> TransformInfo:
    """The transform with that spec, under whatever name, added where there is none.  Raises Conflict when the name
    stands for another spec here."""
    spec_hash = parse(stated.spec).spec_hash
    transforms.ensure_built_in(session)
    name = session.scalar(select(Transform.name).where(Transform.spec_hash == spec_hash))
    if name is not None:
        return transforms.get(session, name)
    # A composite is added by the names of its parts, which are there by now.
    spec: Any = "+".join(name for name, _ in stated.parts) or stated.spec
    added = transforms.add(session, stated.name, spec)
    if added.pipeline.spec_hash != spec_hash:
        raise Conflict(f"the parts of the transform {stated.name!r} mean something else here")
    return added


def _text_set(session: Session, file: VectorFile, named: str | None) -> tuple[TextSetInfo, bool]:
    """The set of the file's texts, and whether it holds the very same content as where the file was made."""
    texts = file.heading.texts
    if texts.hashes is not None:
        found = _by_content(session, content_hash(bytes.fromhex(one) for one in texts.hashes), texts.name)
        if found is not None:
            _require_not_another(session, found, named)
            return found, True
    if texts.ids is None and texts.hashes is None:
        return _by_position(session, file, named), False
    name = named or texts.name or file.stem
    ids = texts.ids if texts.ids is not None else texts.hashes
    info = textsets.add_opaque(session, name, ids or (), source=_source(file))
    return info, info.content_hash == texts.content_hash


def _by_content(session: Session, digest: str, name: str | None) -> TextSetInfo | None:
    query = select(TextSet.id).where(TextSet.content_hash == digest)
    found = session.scalar(query)
    if found is None and name == textsets.STARTER:
        textsets.get(session, textsets.STARTER)  # the bundled set is stored on first use
        found = session.scalar(query)
    return None if found is None else textsets.by_id(session, found)


def _require_not_another(session: Session, found: TextSetInfo, named: str | None) -> None:
    if named is None or named in found.names:
        return
    raise Conflict(
        f"the texts of the file are those of the text set {found.name!r}, not {named!r}",
        hint=f"leave --text-set out, or say --text-set {found.name}",
    )


def _by_position(session: Session, file: VectorFile, name: str | None) -> TextSetInfo:
    """Texts that are only numbered.  The set's name is part of their ids: the hundredth text of one list is not the
    hundredth of another."""
    count = file.heading.texts.count
    if name is None:
        raise BadInput(
            f"{file.names[0]} numbers its {count} texts, but does not say which they are",
            hint="name their list: --text-set NAME; vectors under one NAME will be compared text by text",
        )
    query = select(Text.source_id).join(TextSet).where(TextSet.id == Text.text_set_id, TextSet.opaque)
    known = session.scalars(query.where(Text.source_id.startswith(f"{name}#", autoescape=True))).all()
    if file.format == "modelmap-jsonl" and count < len(known):
        count = len(known)  # the last texts are missing from this file
    ids = [f"{name}#{place}" for place in range(count)]
    return textsets.add_opaque(session, name, ids, source=_source(file))


def _padded(row: FileRow, count: int) -> FileRow:
    short = count - len(row.values)
    if not short:
        return row
    changes: dict[str, Floats] = {
        "values": np.pad(row.values, (0, short), constant_values=np.nan),
        "statuses": np.pad(row.statuses, (0, short), constant_values=Status.NOT_SCORED),
        "token_counts": np.pad(row.token_counts, (0, short)),
    }
    return FileRow(**{**row.__dict__, **changes})


def _profile(file: VectorFile, source: str | None, same: bool) -> str:
    space = file.heading.space
    if source is not None and not _WHO.fullmatch(source):
        raise BadInput(f"{source!r} cannot name a source", hint="at most 60 letters, digits and . _ + -")
    if space is None:
        return f"imported:{source or _who(file)}"
    if not _PROFILE.fullmatch(space.profile):
        raise BadInput(f"{file.names[0]}: {space.profile!r:.80} cannot be a profile")
    if same and source is None:
        return space.profile
    # Its own profile stays in the name: what was chat and what was plain must not meet.
    return f"imported:{source or 'modelkin'}:{space.profile.removeprefix('imported:')}"


def _who(file: VectorFile) -> str:
    return "modelmap" if file.format.startswith("modelmap") else file.stem[:60]


def _owners(
    session: Session, file: VectorFile, rows: list[FileRow], source: str | None
) -> tuple[list[models.ModelInfo], int]:
    """The model of each row, and how many names are new."""
    identities = [row.identity for row in rows if row.identity]
    known = {
        row.identity: models.info_of(row)
        for row in session.scalars(select(Model).where(Model.identity.in_(identities)))
    }
    names = [_name_of(row) for row in rows if row.identity not in known]
    before = session.scalar(select(Model.id).order_by(Model.id.desc()).limit(1)) or 0
    stated = {_name_of(row): row.identity for row in rows if row.identity and row.identity not in known}
    imported_by = f"import:{source or _who(file)}"
    named = models.register_named_many(session, names, imported_by, identities=stated) if names else {}
    owners = [known[row.identity] if row.identity in known else named[_name_of(row)] for row in rows]
    taken: dict[tuple[int, str], int] = {}
    for place, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        first = taken.setdefault((owner.id, row.dtype), place)
        if first != place:
            raise BadInput(
                f"{file.names[0]}: {rows[first].name!r} and {row.name!r} are one model here, {owner.name}",
                hint="keep one of them, or give them two names",
            )
    return owners, len({owner.id for owner in named.values() if owner.id > before})


def _name_of(row: FileRow) -> str:
    """With revision and file, so that a name can be traced to what the file meant."""
    if not row.identity:
        return row.name
    handle = f"{row.name}/{row.file}" if row.file else row.name
    return handle if row.revision in ("", "unknown") else f"{handle}@{row.revision}"


def _fresh(
    session: Session, point: tuple[int, int, str], unit: str, owners: list[models.ModelInfo], rows: list[FileRow]
) -> list[bool]:
    """Whether each row is still to be stored.  Raises Conflict when an import stored other values at its point.

    What is stored under a name counts for the model that the name was resolved to: an export says only the model.
    """
    text_set_id, transform_id, profile = point
    stored: dict[tuple[int, str], list[tuple[int, bytes, str]]] = {}
    resolved = func.coalesce(Model.resolved_to_id, Model.id)
    query = (
        select(resolved, Vector.dtype, Vector.engine_version, Vector.checksum, Vector.unit)
        .join(Model, Model.id == Vector.model_id)
        .where(
            Vector.text_set_id == text_set_id,
            Vector.transform_id == transform_id,
            Vector.profile == profile,
            resolved.in_([owner.resolved_to_id or owner.id for owner in owners]),
        )
    )
    for model_id, dtype, engine, checksum, its_unit in session.execute(query):
        stored.setdefault((model_id, dtype), []).append((engine, bytes(checksum), its_unit))
    fresh = []
    for owner, row in zip(owners, rows, strict=True):
        mine = (vectors.checksum(row.values.tobytes(), row.statuses.tobytes()), unit)
        there = stored.get((owner.resolved_to_id or owner.id, row.dtype), [])
        fresh.append(mine not in [one[1:] for one in there])
        if fresh[-1] and any(engine == IMPORT_ENGINE for engine, _, _ in there):
            raise Conflict(
                f"other values of {owner.name} were imported before, in profile {profile} and dtype {row.dtype}",
                hint="what is stored is never overwritten: say --source WHO to keep both apart",
            )
    return fresh


def _new(
    file: VectorFile,
    point: tuple[int, int, str],
    row: FileRow,
    owner: models.ModelInfo,
    lengths: list[int] | None,
    source: str | None,
) -> NewVector:
    text_set_id, transform_id, profile = point
    floor = row.details.get("noise_floor_nats")
    valid = vectors.is_valid(row.statuses)
    return NewVector(
        model_id=owner.id,
        text_set_id=text_set_id,
        transform_id=transform_id,
        profile=profile,
        dtype=row.dtype,
        engine_version=IMPORT_ENGINE,
        log_likelihoods=row.values,
        statuses=row.statuses,
        token_counts=row.token_counts,
        path=f"import:{file.format}",
        unit=file.heading.unit,
        device_class=_text(row.details.get("device_class")) or "unknown",
        attention=_text(row.details.get("attention")) or "unknown",
        template_hash=_text(row.details.get("template_hash")),
        tokenizer_hash=_text(row.details.get("tokenizer_hash")),
        response_bytes=None if lengths is None else int(np.array(lengths, dtype=np.int64)[valid].sum()),
        noise_floor_nats=floor if isinstance(floor, float) and 0 <= floor < float("inf") else None,
        provenance={
            **_source(file),
            "source": source or _who(file),
            "named_as": row.name,
            "engine_version": row.engine_version,
            "path": _text(row.details.get("path")),
        },
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else None


def _source(file: VectorFile) -> dict[str, Any]:
    return {"format": file.format, "files": list(file.names[:20]), "sha256": file.sha256}
