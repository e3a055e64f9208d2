"""canaries: which code path a model may be scored on"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("engine_version", sa.Integer(), nullable=False),
        sa.Column("transformers", sa.String(), nullable=False),
        sa.Column("torch", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("device_class", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("worst_nats", sa.Float(53), nullable=True),
        sa.Column("reason", sa.String(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "worst_nats is null or (worst_nats >= 0 and worst_nats < 'Infinity')", name=op.f("ck_canaries_worst")
        ),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name=op.f("fk_canaries_model_id_models"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_canaries")),
        sa.UniqueConstraint(
            "model_id", "engine_version", "transformers", "torch", "dtype", "device_class", name="uq_canaries_case"
        ),
    )


def downgrade() -> None:
    op.drop_table("canaries")
