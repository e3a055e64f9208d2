"""What every table shares: named constraints, and a few column types."""

from __future__ import annotations

import datetime
from typing import Annotated

from sqlalchemy import DateTime, Identity, MetaData, func
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlalchemy.types import BigInteger


class Base(DeclarativeBase):
    # Unnamed constraints could not be dropped by a later migration.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_N_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


bigid = Annotated[int, mapped_column(BigInteger, Identity(always=True), primary_key=True)]
instant = Annotated[datetime.datetime, mapped_column(DateTime(timezone=True))]
created = Annotated[datetime.datetime, mapped_column(DateTime(timezone=True), server_default=func.now())]
