"""`python -m demo.population FOLDER [NAME…]` builds the population there and lists it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from demo.population import build


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    started = time.monotonic()
    members = build(
        Path(arguments[0]), only=arguments[1:] or None, progress=lambda name: print(f"making {name}", file=sys.stderr)
    )
    for member in members:
        origin = f"{member.relation} of {' and '.join(member.parents)}" if member.parents else member.relation
        print(f"{member.name:<20} {member.architecture:<9} {origin:<40} {member.path}")
    print(f"{len(members)} members in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
