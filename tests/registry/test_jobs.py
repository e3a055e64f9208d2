"""Leases: one holder at a time, a dead one replaced, a lost one fenced off."""

import numpy as np
import pytest
from sqlalchemy import text

from registry.errors import Busy
from registry.queries import jobs, vectors
from registry.queries.jobs import ScoreRequest, Slice
from registry.tables import Job, Model, Shard, TextSet, Transform


@pytest.fixture
def request_(session):
    model = Model(kind="folder", handle="local/m", revision="r", identity="test-jobs", source="/nowhere")
    text_set = TextSet(content_hash="jobs", n_texts=4, n_prompts=4)
    session.add_all([model, text_set, Transform(name="t-one", spec=[], spec_hash="t1")])
    session.flush()
    return ScoreRequest(model.id, text_set.id, "chat", "float32", 1)


@pytest.fixture
def transform_id(session, request_):
    return session.query(Transform.id).filter_by(name="t-one").scalar()


def slice_of(transform_id, start=0, stop=4):
    n = stop - start
    return Slice(
        transform_id,
        start,
        stop,
        np.linspace(-600, -1, n, dtype=np.float32),
        np.zeros(n, np.uint8),
        np.full(n, 7, np.int32),
        {},
    )


def expire(session, job_id):
    session.execute(text("update leases set expires_at = now() - interval '1 s' where job_id = :id"), {"id": job_id})


def opened(session, request_, transform_ids, shard_texts=32):
    job, _ = jobs.open_score_job(session, request_, transform_ids, shard_texts)
    return job


@pytest.fixture
def other_id(session, request_):
    session.add(Transform(name="t-two", spec=[], spec_hash="t2"))
    session.flush()
    return session.query(Transform.id).filter_by(name="t-two").scalar()


def stored(session, request_, transform_id):
    """As if another job had finished this transform."""
    n = 4
    vectors.insert_many(
        session,
        [
            vectors.NewVector(
                model_id=request_.model_id,
                text_set_id=request_.text_set_id,
                transform_id=transform_id,
                profile=request_.profile,
                dtype=request_.dtype,
                engine_version=request_.engine_version,
                log_likelihoods=np.full(n, -1, np.float32),
                statuses=np.zeros(n, np.uint8),
                token_counts=np.ones(n, np.int32),
                path="test",
            )
        ],
    )


def test_the_same_request_is_the_same_job_and_keeps_its_transforms(session, request_, transform_id, other_id):
    first = opened(session, request_, [transform_id])
    again = opened(session, request_, [transform_id, other_id], 64)
    assert again.id == first.id
    assert again.arguments["transform_ids"] == [transform_id], "another mixture would change the batches"
    assert again.arguments["shard_texts"] == 32, "shard boundaries must not depend on who resumes"


def test_other_transforms_get_a_job_of_their_own_once_the_first_is_done(session, request_, transform_id, other_id):
    first = opened(session, request_, [transform_id])
    jobs.claim(session, first.id, "me")
    jobs.release(session, first.id, "me", "done")
    stored(session, request_, transform_id)
    second, have = jobs.open_score_job(session, request_, [transform_id, other_id], 32)
    assert (second.arguments["transform_ids"], have) == ([other_id], {transform_id})
    assert opened(session, request_, [transform_id]) is None


def test_work_in_progress_is_waited_for_whatever_its_transforms(session, request_, transform_id, other_id):
    first = opened(session, request_, [transform_id])
    jobs.claim(session, first.id, "me")
    assert opened(session, request_, [other_id]).id == first.id


def test_unfinished_work_of_other_transforms_is_set_aside_and_found_again(session, request_, transform_id, other_id):
    first = opened(session, request_, [transform_id])
    second = opened(session, request_, [other_id])
    assert second.id != first.id
    jobs.claim(session, second.id, "me")
    jobs.release(session, second.id, "me", "failed", "always fails")
    assert opened(session, request_, [transform_id]).id == first.id


def test_a_job_whose_vectors_are_there_blocks_nobody(session, request_, transform_id, other_id):
    first = opened(session, request_, [transform_id])
    jobs.claim(session, first.id, "me")
    jobs.put_slices(session, first.id, "me", [slice_of(transform_id)])
    jobs.release(session, first.id, "me", "failed", "conflict")
    stored(session, request_, transform_id)
    second = opened(session, request_, [transform_id, other_id])
    assert second.id != first.id
    assert second.arguments["transform_ids"] == [other_id]
    assert session.query(Shard).count() == 0
    assert session.get(Job, first.id).state == "cancelled"


def test_a_failed_job_is_opened_again_with_its_shards(session, request_, transform_id):
    job = opened(session, request_, [transform_id])
    jobs.claim(session, job.id, "me")
    jobs.put_slices(session, job.id, "me", [slice_of(transform_id)])
    jobs.release(session, job.id, "me", "failed", "boom")
    session.expire_all()
    assert session.get(Job, job.id).reason == "boom"
    again = opened(session, request_, [transform_id])
    assert (again.id, again.state) == (job.id, "queued")
    assert jobs.finished_slices(session, job.id) == {(transform_id, 0)}


def test_a_second_worker_is_refused_while_the_first_holds_the_lease(session, request_, transform_id):
    job = opened(session, request_, [transform_id])
    jobs.claim(session, job.id, "first")
    with pytest.raises(Busy, match="first"):
        jobs.claim(session, job.id, "second")


def test_a_lease_that_ran_out_is_taken_over_and_fences_off_the_old_holder(session, request_, transform_id):
    job = opened(session, request_, [transform_id])
    jobs.claim(session, job.id, "old")
    expire(session, job.id)
    assert jobs.claim(session, job.id, "new").attempts == 2
    with pytest.raises(Busy, match="lost"):
        jobs.put_slices(session, job.id, "old", [slice_of(transform_id)])
    assert session.query(Shard).count() == 0
    jobs.release(session, job.id, "old", "failed", "must not touch the new holder's job")
    session.expire_all()
    assert session.get(Job, job.id).state == "running"


def test_a_holder_known_to_be_dead_need_not_run_out(session, request_, transform_id):
    job = opened(session, request_, [transform_id])
    jobs.claim(session, job.id, "dead")
    assert jobs.claim(session, job.id, "next", taking_over="dead").state == "running"


def test_a_finished_job_is_not_run_again(session, request_, transform_id):
    job = opened(session, request_, [transform_id])
    jobs.claim(session, job.id, "me")
    jobs.release(session, job.id, "me", "done")
    session.expire_all()
    assert jobs.claim(session, job.id, "late").state == "done"
    assert jobs.lease_holder(session, job.id) is None


def test_slices_come_back_whole_and_leave_the_table(session, request_, transform_id):
    job = opened(session, request_, [transform_id], 2)
    jobs.claim(session, job.id, "me")
    jobs.put_slices(session, job.id, "me", [slice_of(transform_id, 2, 4)])
    jobs.put_slices(session, job.id, "me", [slice_of(transform_id, 0, 2)])
    taken = jobs.take_slices(session, job.id, "me")
    assert [(part.start, part.stop) for part in taken] == [(0, 2), (2, 4)]
    assert taken[0].log_likelihoods.tolist() == [-600.0, -1.0]
    assert jobs.finished_slices(session, job.id) == set()
