"""The fixtures that every test of the database stands on."""

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from registry import database

COUNT = text("select count(*) from transforms where name = 'of-a-test'")
INSERT = text("insert into transforms (name, spec, spec_hash) values ('of-a-test', '[]', 'x')")


def test_a_commit_in_a_test_is_undone_1(session: Session) -> None:
    assert session.scalar(COUNT) == 0
    session.execute(INSERT)
    session.commit()
    assert session.scalar(COUNT) == 1


def test_a_commit_in_a_test_is_undone_2(session: Session) -> None:
    assert session.scalar(COUNT) == 0
    session.execute(INSERT)
    session.commit()


def test_a_fresh_database_is_what_the_registry_uses(fresh_database: Engine) -> None:
    with database.session() as opened:
        opened.execute(INSERT)
    with fresh_database.connect() as connection:
        assert connection.scalar(COUNT) == 1


def test_a_fresh_database_is_fresh(fresh_database: Engine) -> None:
    with fresh_database.connect() as connection:
        assert connection.scalar(COUNT) == 0
