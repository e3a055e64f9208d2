"""The schema, one module an aggregate.  Importing this package defines every table."""

from registry.tables.base import Base
from registry.tables.evidence import EvidenceRow
from registry.tables.jobs import Job, Lease, Shard
from registry.tables.models import AliasEvent, Model, ModelAlias, ModelTag
from registry.tables.observations import Canary, Vector
from registry.tables.texts import Text, TextSet, TextSetName, Transform

__all__ = [
    "AliasEvent",
    "Base",
    "Canary",
    "EvidenceRow",
    "Job",
    "Lease",
    "Model",
    "ModelAlias",
    "ModelTag",
    "Shard",
    "Text",
    "TextSet",
    "TextSetName",
    "Transform",
    "Vector",
]
