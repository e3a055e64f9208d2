"""What ancestry says beside what the nearest neighbours say, and why the two may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api.cli.output import number
from demo.population import Member

STILL_THE_SAME_MODEL = ("reupload", "permuted", "quantised", "pruned", "perturbed")
"""Edits that barely change behaviour: their nearest neighbour must be of the family, or something is broken."""


@dataclass(frozen=True)
class Neighbour:
    name: str
    kl_nats: float


@dataclass(frozen=True)
class Verdict:
    member: Member
    nearest: Neighbour
    agrees: bool
    """The nearest neighbour is a relative: it shares an ancestor with the model."""
    why: str
    """Where it does not agree."""
    must_agree: bool

    @property
    def failed(self) -> bool:
        return self.must_agree and not self.agrees


def judge(member: Member, neighbours: Sequence[Neighbour], members: Mapping[str, Member]) -> Verdict:
    """`neighbours` of `member`, nearest first, without itself; `members` has all of them by name."""
    nearest = neighbours[0]
    agrees = members[nearest.name].family == member.family
    why = "" if agrees else _why(member, nearest, neighbours, members)
    return Verdict(member, nearest, agrees, why, member.relation in STILL_THE_SAME_MODEL)


def origin(member: Member) -> str:
    return f"{member.relation} of {' + '.join(member.parents)}" if member.parents else f"base of {member.family}"


def _why(member: Member, nearest: Neighbour, neighbours: Sequence[Neighbour], members: Mapping[str, Member]) -> str:
    kin = next((one for one in neighbours if members[one.name].family == member.family), None)
    if kin is None:
        return "no relative of it is in this space"
    gap = f"its closest relative is {kin.name} at {number(kin.kl_nats)} nats"
    if member.relation == "finetuned":
        return f"{gap}: training on another subject moved it further than some families are apart"
    if member.relation == "distilled":
        return f"{gap}: a student learns its teacher's answers, not its weights, and is free where it was not taught"
    if member.relation == "merged":
        return f"{gap}: the mean of two models is a third one"
    return f"{gap}: on these texts the two families happen to behave alike"
