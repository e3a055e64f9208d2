"""Vectors in and out of PostgreSQL: binary COPY against the ORM, in one run.

    python -m benchmarks.bulk [--vectors 500] [--texts 10000] [--passes 3]

Bar: COPY at least 10 times as fast as the ORM, each way.  The ORM path inserts and loads rows of an equivalent table
whose values are a float array, which is how one would map a vector without thinking of its size; the ORM over the same
bytea columns is shown beside it, so that it is plain what the format gives and what COPY gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from sqlalchemy import ARRAY, REAL, BigInteger, Engine, Identity, LargeBinary, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.scratch import scratch_database, settle
from registry import database
from registry.queries import models, textsets, transforms, vectors
from registry.queries.vectors import NewVector

BAR = 10.0


class OrmBase(DeclarativeBase):
    pass


class ArrayRow(OrmBase):
    __tablename__ = "bench_array"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    values: Mapped[list[float]] = mapped_column(ARRAY(REAL))
    statuses: Mapped[list[float]] = mapped_column(ARRAY(REAL))


class BytesRow(OrmBase):
    __tablename__ = "bench_bytes"
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    values: Mapped[bytes] = mapped_column(LargeBinary)
    statuses: Mapped[bytes] = mapped_column(LargeBinary)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=500)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    k, n = arguments.vectors, arguments.texts
    values = np.random.default_rng(0).normal(-590, 200, (k, n)).astype(np.float32)
    statuses, counts = np.zeros(n, np.uint8), np.full(n, 50, np.int32)
    megabytes = 4 * k * n / 1e6
    times: dict[str, list[float]] = {}
    with scratch_database() as engine:
        OrmBase.metadata.create_all(engine)
        with database.session() as session:
            text_set = textsets.add_opaque(session, "texts", [f"t{at}" for at in range(n)])
            base = transforms.get(session, "base").id
            names = [f"org/m{at}" for at in range(k)]
            ids = [one.id for one in models.register_named_many(session, names, "benchmark").values()]

        def copy_in() -> None:
            with database.session() as session:
                vectors.insert_many(
                    session,
                    (
                        NewVector(
                            model_id=model_id,
                            text_set_id=text_set.id,
                            transform_id=base,
                            profile="chat",
                            dtype="float32",
                            engine_version=1,
                            log_likelihoods=row,
                            statuses=statuses,
                            token_counts=counts,
                            path="benchmark",
                        )
                        for model_id, row in zip(ids, values, strict=True)
                    ),
                )

        def copy_out() -> None:
            with database.session() as session:
                wanted = list(session.scalars(text("select id from vectors")))
                read = np.stack([one.log_likelihoods for one in vectors.read(session, wanted)])
            assert read.shape == (k, n)

        def array_in() -> None:
            with Session(engine) as session:
                session.add_all([ArrayRow(values=row.tolist(), statuses=statuses.tolist()) for row in values])
                session.commit()

        def array_out() -> None:
            with Session(engine) as session:
                read = np.array([row.values for row in session.scalars(select(ArrayRow))], np.float32)
            assert read.shape == (k, n)

        def bytes_in() -> None:
            with Session(engine) as session:
                session.add_all([BytesRow(values=row.tobytes(), statuses=statuses.tobytes()) for row in values])
                session.commit()

        def bytes_out() -> None:
            with Session(engine) as session:
                rows = session.scalars(select(BytesRow))
                read = np.stack([np.frombuffer(row.values, np.float32) for row in rows])
            assert read.shape == (k, n)

        for _ in range(arguments.passes):
            for name, write, read in (
                ("copy", copy_in, copy_out),
                ("orm array", array_in, array_out),
                ("orm bytea", bytes_in, bytes_out),
            ):
                empty(engine)
                times.setdefault(f"{name} in", []).append(timed(write))
                settle(engine)
                times.setdefault(f"{name} out", []).append(timed(read))
    report(times, megabytes, k, n)


def empty(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("truncate vectors, bench_array, bench_bytes"))
    settle(engine)


def report(times: dict[str, list[float]], megabytes: float, k: int, n: int) -> None:
    middle = {name: statistics.median(each) for name, each in times.items()}
    print(
        f"{k} vectors of {n} float32 values, {megabytes:.0f} MB, medians of {len(times['copy in'])} interleaved passes"
    )
    print(f"{'':16} {'in s':>8} {'MB/s':>8} {'out s':>8} {'MB/s':>8}")
    for name in ("copy", "orm array", "orm bytea"):
        write, read = middle[f"{name} in"], middle[f"{name} out"]
        print(f"{name:16} {write:8.2f} {megabytes / write:8.0f} {read:8.2f} {megabytes / read:8.0f}")
    ratios = {way: middle[f"orm array {way}"] / middle[f"copy {way}"] for way in ("in", "out")}
    print(f"copy against the ORM: in {ratios['in']:.1f} ×, out {ratios['out']:.1f} × (bar: {BAR:.0f} ×)")
    if min(ratios.values()) < BAR:
        sys.exit("below the bar")


if __name__ == "__main__":
    main()
