"""Scoring jobs end to end on a real tiny model: resumable to the byte, whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from registry import database, localdb
from registry.errors import BadInput, Busy, Refused, Unsupported
from registry.queries import jobs as job_rows
from registry.queries import models, textsets, vectors
from registry.textsets import Pair, freeze
from tasks import jobs, leases
from tasks.scoring import ENGINE_VERSION

N_TEXTS = 80
MODELKIN = [sys.executable, "-c", "from api.cli import main; main()"]


@pytest.fixture
def text_set(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"What comes after {n}?", "response": f"After {n} comes {n + 1}, " + "and so on " * (n % 7)}
        for n in range(N_TEXTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def modelkin(env, *words, check=True):
    done = subprocess.run([*MODELKIN, *map(str, words)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


# A pause after each shard, so that there is something left to kill.
SLOW = (
    "import time; from registry.queries import jobs; put = jobs.put_slices\n"
    "def slowly(session, *rest): put(session, *rest); session.commit(); time.sleep(1)\n"
    "jobs.put_slices = slowly\n"
    "from api.cli import main; main()"
)


@pytest.fixture
def started():
    """Starts the slow run; whatever becomes of the test, it does not outlive it."""
    running = []

    def start(env):
        run = subprocess.Popen(
            [sys.executable, "-c", SLOW, *SCORE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        running.append(run)
        return run

    yield start
    for run in running:
        run.kill()
        run.communicate()


def stored(url):
    """Everything of the vectors that must not depend on interruptions."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "select t.name, v.log_likelihoods, v.statuses, v.token_counts, v.checksum, v.n_ok, v.sum_value"
                " from vectors v join transforms t on t.id = v.transform_id order by t.name"
            )
        ).all()
        assert connection.scalar(text("select count(*) from shards")) == 0
        assert connection.scalar(text("select count(*) from leases")) == 0
    return [tuple(row) for row in rows]


def count(url, table):
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return connection.scalar(text(f"select count(*) from {table}"))


def prepare(env, member, text_set):
    modelkin(env, "textset", "add", text_set, "--name", "pairs")
    modelkin(env, "model", "add", member.path, "--as", "tiny")


SCORE = ("score", "local/tiny", "--text-set", "pairs", "--transforms", "base,repeat+cot", "--unconditional")


UNDISTURBED = []


@pytest.fixture
def undisturbed(modelkin_env, database_url, population_member, text_set):
    """The bytes of a run that nobody interrupted, made once a worker."""
    if not UNDISTURBED:
        prepare(modelkin_env, population_member("llama-base"), text_set)
        modelkin(modelkin_env, *SCORE)
        UNDISTURBED.extend(stored(database_url))
        assert [row[0] for row in UNDISTURBED] == ["base", "empty", "repeat+cot"]
    return UNDISTURBED


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_to_the_same_bytes(
    how, started, undisturbed, another_database, modelkin_env, population_member, text_set
):
    env = modelkin_env | {"DATABASE_URL": another_database}
    prepare(env, population_member("llama-base"), text_set)
    # A pause after each shard, so that there is something left to kill.
    slow = (
        "import time; from registry.queries import jobs; put = jobs.put_slices\n"
        "def slowly(session, *rest): put(session, *rest); session.commit(); time.sleep(1)\n"
        "jobs.put_slices = slowly\n"
        "from api.cli import main; main()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", slow, *SCORE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while count(another_database, "shards") == 0 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(how)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), errors
    assert how == signal.SIGKILL or b"interrupted at" in errors
    assert count(another_database, "shards") > 0, errors
    assert count(another_database, "vectors") == 0
    # At once: the dead holder's lease need not run out.
    again = modelkin(env, *SCORE)
    assert "goes on at" in again.stderr
    assert stored(another_database) == undisturbed, again.stderr
    assert "already scored" in modelkin(env, *SCORE).stderr
    assert count(another_database, "jobs") == 1


def test_a_killed_database_loses_nothing_that_was_finished(
    started, undisturbed, modelkin_env, population_member, text_set, tmp_path
):
    home = tmp_path / "own-server"
    env = {name: value for name, value in modelkin_env.items() if name != "DATABASE_URL"} | {"MODELKIN_HOME": str(home)}
    try:
        prepare(env, population_member("llama-base"), text_set)
        url = localdb.ensure_postgres(home)
        run = started(env)
        deadline = time.monotonic() + 120
        while count(url, "shards") == 0 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        engine = create_engine(url, poolclass=NullPool)
        with engine.connect() as connection:
            some_backend = connection.scalar(text("select pg_backend_pid()"))
            postmaster = int(Path(f"/proc/{some_backend}/stat").read_text().rsplit(") ", 1)[1].split()[1])
        # Only now: a connection that is still open would be told of it when it closes.
        os.kill(postmaster, signal.SIGKILL)
        run.communicate(timeout=120)
        modelkin(env, *SCORE)
        assert stored(localdb.ensure_postgres(home)) == undisturbed
    finally:
        localdb.remove(home)


@pytest.fixture
def registered(fresh_database, population_member):
    from tasks import registration

    member = population_member("llama-base")
    with database.session() as session:
        model, _ = models.register(session, registration.candidate(str(member.path)))
        frozen = freeze([Pair(f"Question {n}?", f"Answer number {n}.") for n in range(40)])
        textsets.add(session, "small", frozen)
    return model


def test_a_second_worker_leaves(registered):
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    with database.session() as session:
        job_rows.claim(session, job.id, "elsewhere:1:aa")
    with pytest.raises(Busy, match="elsewhere"):
        jobs.score(job, device="cpu")


def test_an_error_leaves_the_job_failed_with_its_reason_and_the_next_call_goes_on(registered, monkeypatch):
    from tasks.model_scorer import ModelScorer

    real, calls = ModelScorer._slices, []

    def breaks_at_the_second_shard(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("cosmic ray")
        return real(*arguments, **options)

    monkeypatch.setattr(ModelScorer, "_slices", breaks_at_the_second_shard)
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    with pytest.raises(RuntimeError, match="cosmic ray"):
        jobs.score(job, device="cpu")
    with database.session() as session:
        failed = job_rows.get(session, job.id)
        assert (failed.state, failed.reason) == ("failed", "RuntimeError: cosmic ray")
        assert len(job_rows.finished_slices(session, job.id)) == 1
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    outcome = jobs.score(job, device="cpu")
    assert len(calls) == 3, "the finished shard is not scored twice"
    assert outcome.n_texts == 40
    with database.session() as session:
        assert job_rows.get(session, job.id).state == "done"


def test_an_interrupted_run_is_finished_before_other_transforms_are_scored(registered):
    """Byte for byte: `base`, interrupted, then `base,cot` gives the `base` of an undisturbed run."""
    from registry.queries import transforms

    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    outcome = jobs.score_model(registered, "small", ["base", "cot"], "chat", "float32", device="cpu")
    assert outcome.scored == ("base", "cot")
    with database.session() as session:
        assert job_rows.get(session, job.id).state == "done"
        assert job_rows.get(session, job.id).arguments["transform_ids"] == [transforms.get(session, "base").id]
    again = jobs.score_model(registered, "small", ["cot", "base"], "chat", "float32", device="cpu")
    assert (again.scored, again.already) == ((), ("cot", "base"))


def test_whoever_waits_goes_on_with_what_is_still_missing(registered):
    """A worker on `base` holds the model; a waiter for `cot` scores it once that worker is done."""
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    with database.session() as session:
        job_rows.claim(session, job.id, "elsewhere:1:aa")

    def finish():
        time.sleep(1)
        with database.session() as session:
            job_rows.release(session, job.id, "elsewhere:1:aa", "queued")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(finish)
        outcome = jobs.score_model(registered, "small", ["cot"], "chat", "float32", device="cpu", wait=True)
        other.result()
    assert outcome.scored[-1] == "cot"


@pytest.mark.parametrize("batch_tokens", [0, -5])
def test_an_impossible_batch_is_refused(registered, batch_tokens):
    with pytest.raises(BadInput, match="at least one token"):
        jobs.score_model(registered, "small", ["base"], "chat", "float32", batch_tokens=batch_tokens)


def test_provenance_stands_beside_the_vector(registered):
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    jobs.score(job, device="cpu")
    with database.session() as session:
        row = session.execute(text("select * from vectors")).mappings().one()
    assert row["n_ok"] == 40
    assert row["device_class"] == "cpu"
    assert row["response_bytes"] == sum(len(f"Answer number {n}.") for n in range(40))
    assert row["tokens"] > 40
    provenance = row["provenance"]
    assert provenance["seconds"] > 0
    assert provenance["peak_memory_bytes"] > 1e6
    assert provenance["job_id"] == job.id
    assert {"torch", "transformers", "tokenizers"} <= set(provenance["runs"][0]["versions"])


def test_weights_that_change_while_they_are_scored_end_the_job(
    fresh_database, population_member, monkeypatch, tmp_path
):
    from tasks import registration, scoring

    folder = tmp_path / "copy"
    shutil.copytree(population_member("llama-base").path, folder)
    with database.session() as session:
        model, _ = models.register(session, registration.candidate(str(folder)))
        textsets.add(session, "small", freeze([Pair(f"Question {n}?", f"Answer number {n}.") for n in range(4)]))
    real = scoring.score_spans

    def while_somebody_writes(*arguments, **options):
        scores = real(*arguments, **options)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\0" * 100)
        return scores

    monkeypatch.setattr(scoring, "score_spans", while_somebody_writes)
    job, _ = jobs.open_score(model, "small", ["base"], "chat", "float32")
    with pytest.raises(Refused, match="changed"):
        jobs.score(job, device="cpu")
    with database.session() as session:
        assert session.scalar(text("select count(*) from shards")) == 0
        assert session.scalar(text("select count(*) from vectors")) == 0


def test_many_non_finite_texts_mark_the_model_unstable(registered, monkeypatch):
    from registry.statuses import Status
    from tasks import scoring

    real = scoring.score_spans

    def overflowing(*arguments, **options):
        scores = real(*arguments, **options)
        scores.log_likelihoods[::4], scores.statuses[::4] = float("nan"), Status.NON_FINITE
        return scores

    monkeypatch.setattr(scoring, "score_spans", overflowing)
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    outcome = jobs.score(job, device="cpu")
    assert outcome.statuses["non_finite"] == 10
    with database.session() as session:
        assert models.get(session, registered.id).status == "unstable"


@pytest.mark.parametrize(
    ("text_set", "transforms", "profile", "error"),
    [
        ("small", ["base"], "shout", BadInput),
        ("small", [], "chat", BadInput),
        ("ids", ["base"], "chat", Unsupported),
    ],
)
def test_what_cannot_be_scored_is_refused_before_any_model_is_loaded(registered, text_set, transforms, profile, error):
    with database.session() as session:
        textsets.add_opaque(session, "ids", ["a", "b"])
    with pytest.raises(error):
        jobs.open_score(registered, text_set, transforms, profile, "float32")


def test_a_name_cannot_be_scored(registered):
    with database.session() as session:
        name = models.register_named(session, "some/model", "an import")
    with pytest.raises(Unsupported, match="only a name"):
        jobs.open_score(name, "small", ["base"], "chat", "float32")


def test_who_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    holder = leases.new_holder()
    machine = holder.rsplit(":", 2)[0]
    assert not leases.is_dead(holder)
    time.sleep(0.5)
    assert leases.is_dead(f"{machine}:{child.pid}:aa"), "a zombie never writes again"
    child.wait()
    assert leases.is_dead(f"{machine}:{child.pid}:aa")
    assert not leases.is_dead(f"other-machine:{child.pid}:aa")
    assert not leases.is_dead("not a holder")
    assert os.getpid() > 0


def test_the_heartbeat_renews_and_notices_a_loss(registered, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.1)
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    with database.session() as session:
        job_rows.claim(session, job.id, "me")
        before = session.scalar(text("select expires_at from leases"))
    heartbeat = leases.Heartbeat(job.id, "me")
    with heartbeat.beating():
        time.sleep(0.5)
        with database.session() as session:
            assert session.scalar(text("select expires_at from leases")) > before
            session.execute(text("update leases set holder = 'thief'"))
        time.sleep(0.5)
        assert heartbeat.lost


def test_vectors_of_the_same_point_are_not_scored_twice_by_two_engines(registered):
    job, _ = jobs.open_score(registered, "small", ["base"], "chat", "float32")
    jobs.score(job, device="cpu")
    with database.session() as session:
        small = textsets.get(session, "small")
        assert len(vectors.scored_transforms(session, registered.id, small.id, "chat", "float32", ENGINE_VERSION)) == 1
        assert not vectors.scored_transforms(session, registered.id, small.id, "chat", "bfloat16", ENGINE_VERSION)
