"""initial schema"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


# Compression saves nothing on float32 and costs two thirds of the write speed.
EXTERNAL = {
    "vectors": ("log_likelihoods", "statuses", "token_counts"),
    "shards": ("log_likelihoods", "statuses", "token_counts"),
}


def upgrade() -> None:
    # Derived projections will live in pgvector columns; it is asked for at once, so that a server without it is
    # noticed at `modelkin init` and not months later.
    op.execute("create extension if not exists vector")
    op.create_table(
        "alias_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("from_model_id", sa.BigInteger(), nullable=True),
        sa.Column("to_model_id", sa.BigInteger(), nullable=True),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias_events")),
    )
    op.create_index(op.f("ix_alias_events_alias"), "alias_events", ["alias"], unique=False)
    op.create_table(
        "models",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("handle", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("identity", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("file", sa.String(), server_default="", nullable=False),
        sa.Column("base_id", sa.BigInteger(), nullable=True),
        sa.Column("resolved_to_id", sa.BigInteger(), nullable=True),
        sa.Column("weights_hash", sa.String(), nullable=True),
        sa.Column("status", sa.String(), server_default="active", nullable=False),
        sa.Column("status_reason", sa.String(), server_default="", nullable=False),
        sa.Column("trust_remote_code", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("architecture", sa.String(), nullable=True),
        sa.Column("model_type", sa.String(), nullable=True),
        sa.Column("parameters", sa.BigInteger(), nullable=True),
        sa.Column("dtype", sa.String(), nullable=True),
        sa.Column("quantization", sa.String(), nullable=True),
        sa.Column("vocabulary", sa.Integer(), nullable=True),
        sa.Column("context_length", sa.Integer(), nullable=True),
        sa.Column("licence", sa.String(), nullable=True),
        sa.Column("base_model", sa.String(), nullable=True),
        sa.Column("base_model_relation", sa.String(), nullable=True),
        sa.Column("pipeline_tag", sa.String(), nullable=True),
        sa.Column("template_hash", sa.String(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("gated", sa.String(), nullable=True),
        sa.Column("downloads", sa.BigInteger(), nullable=True),
        sa.Column("likes", sa.BigInteger(), nullable=True),
        sa.Column("facts", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("facts_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("(kind = 'adapter') = (base_id is not null)", name=op.f("ck_models_adapter_has_base")),
        sa.CheckConstraint("handle ~ '^[^/[:space:]@]+/[^/[:space:]@]+$'", name=op.f("ck_models_handle")),
        sa.CheckConstraint(
            "kind in ('hub', 'folder', 'gguf', 'adapter', 'endpoint', 'named')", name=op.f("ck_models_kind")
        ),
        sa.CheckConstraint("resolved_to_id is null or kind = 'named'", name=op.f("ck_models_only_names_resolve")),
        sa.CheckConstraint("status in ('active', 'unstable', 'retired')", name=op.f("ck_models_status")),
        sa.ForeignKeyConstraint(["base_id"], ["models.id"], name=op.f("fk_models_base_id_models")),
        sa.ForeignKeyConstraint(["resolved_to_id"], ["models.id"], name=op.f("fk_models_resolved_to_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("identity", name=op.f("uq_models_identity")),
    )
    op.create_index("ix_models_handle_key", "models", [sa.literal_column("lower(handle)")], unique=False)
    op.create_index("ix_models_weights_hash", "models", ["weights_hash"], unique=False)
    op.create_table(
        "text_sets",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("content_hash", sa.String(), nullable=False),
        sa.Column("n_texts", sa.Integer(), nullable=False),
        sa.Column("n_prompts", sa.Integer(), nullable=False),
        sa.Column("opaque", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("parent_id", sa.BigInteger(), nullable=True),
        sa.Column("derivation", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("source", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("n_texts > 0", name=op.f("ck_text_sets_not_empty")),
        sa.ForeignKeyConstraint(["parent_id"], ["text_sets.id"], name=op.f("fk_text_sets_parent_id_text_sets")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_text_sets")),
        sa.UniqueConstraint("content_hash", name=op.f("uq_text_sets_content_hash")),
    )
    op.create_table(
        "transforms",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("spec_hash", sa.String(), nullable=False),
        sa.Column("parts", sa.ARRAY(sa.String()), server_default="{}", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transforms")),
        sa.UniqueConstraint("name", name=op.f("uq_transforms_name")),
        sa.UniqueConstraint("spec_hash", name=op.f("uq_transforms_spec_hash")),
    )
    op.create_table(
        "evidence",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("a_id", sa.BigInteger(), nullable=False),
        sa.Column("b_id", sa.BigInteger(), nullable=False),
        sa.Column("statistic", sa.String(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=True),
        sa.Column("reason", sa.String(), server_default="", nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("closer", sa.String(), nullable=False),
        sa.Column("symmetric", sa.Boolean(), nullable=False),
        sa.Column("interval", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("p_value", sa.Float(precision=53), nullable=True),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("space", sa.String(), nullable=False),
        sa.Column("inputs_hash", sa.String(), nullable=False),
        sa.Column("not_shown", sa.String(), nullable=False),
        sa.Column("details", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("closer in ('lower', 'higher', 'none')", name=op.f("ck_evidence_closer")),
        sa.CheckConstraint("value is not null or reason <> ''", name=op.f("ck_evidence_null_has_reason")),
        sa.CheckConstraint(
            "value is null or (value > '-Infinity' and value < 'Infinity')",
            name=op.f("ck_evidence_value_finite"),
        ),
        sa.ForeignKeyConstraint(["a_id"], ["models.id"], name=op.f("fk_evidence_a_id_models")),
        sa.ForeignKeyConstraint(["b_id"], ["models.id"], name=op.f("fk_evidence_b_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evidence")),
        sa.UniqueConstraint("method", "version", "statistic", "a_id", "b_id", "inputs_hash", name="uq_evidence_inputs"),
    )
    op.create_index("ix_evidence_b_id", "evidence", ["b_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("arguments", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.String(), server_default="queued", nullable=False),
        sa.Column("reason", sa.String(), server_default="", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state in ('queued', 'running', 'done', 'failed', 'cancelled')", name=op.f("ck_jobs_state")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_jobs_model_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_key"), "jobs", ["key"], unique=False)
    op.create_index(op.f("ix_jobs_model_id"), "jobs", ["model_id"], unique=False)
    op.create_index(
        "uq_jobs_active_key",
        "jobs",
        ["key"],
        unique=True,
        postgresql_where=sa.text("state in ('queued', 'running')"),
    )
    op.create_table(
        "model_aliases",
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), server_default="user", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name=op.f("fk_model_aliases_model_id_models"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("alias", name=op.f("pk_model_aliases")),
    )
    op.create_index(op.f("ix_model_aliases_model_id"), "model_aliases", ["model_id"], unique=False)
    op.create_table(
        "model_tags",
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("tag", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name=op.f("fk_model_tags_model_id_models"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_id", "tag", name=op.f("pk_model_tags")),
    )
    op.create_index(op.f("ix_model_tags_tag"), "model_tags", ["tag"], unique=False)
    op.create_table(
        "text_set_names",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("text_set_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["text_set_id"],
            ["text_sets.id"],
            name=op.f("fk_text_set_names_text_set_id_text_sets"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_text_set_names")),
    )
    op.create_index(op.f("ix_text_set_names_text_set_id"), "text_set_names", ["text_set_id"], unique=False)
    op.create_table(
        "texts",
        sa.Column("text_set_id", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("text_hash", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_id", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.String(), nullable=True),
        sa.Column("response", sa.String(), nullable=True),
        sa.Column("response_bytes", sa.Integer(), nullable=True),
        sa.Column("source_id", sa.String(), nullable=True),
        sa.Column("columns", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("tags", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.CheckConstraint("(prompt is null) = (response is null)", name=op.f("ck_texts_pair_or_opaque")),
        sa.ForeignKeyConstraint(
            ["text_set_id"], ["text_sets.id"], name=op.f("fk_texts_text_set_id_text_sets"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("text_set_id", "position", name=op.f("pk_texts")),
        sa.UniqueConstraint("text_set_id", "text_hash", name=op.f("uq_texts_text_set_id_text_hash")),
    )
    op.create_table(
        "vectors",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("text_set_id", sa.BigInteger(), nullable=False),
        sa.Column("transform_id", sa.BigInteger(), nullable=False),
        sa.Column("profile", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("engine_version", sa.Integer(), nullable=False),
        sa.Column("unit", sa.String(), server_default="nats", nullable=False),
        sa.Column("log_likelihoods", sa.LargeBinary(), nullable=False),
        sa.Column("statuses", sa.LargeBinary(), nullable=False),
        sa.Column("token_counts", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("n_texts", sa.Integer(), sa.Computed("octet_length(statuses)", persisted=True), nullable=False),
        sa.Column("n_ok", sa.Integer(), nullable=False),
        sa.Column("sum_value", sa.Float(precision=53), nullable=False),
        sa.Column("mean_value", sa.Float(precision=53), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("response_bytes", sa.BigInteger(), nullable=True),
        sa.Column("noise_floor_nats", sa.Float(precision=53), nullable=True),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("device_class", sa.String(), nullable=False),
        sa.Column("attention", sa.String(), nullable=False),
        sa.Column("template_hash", sa.String(), nullable=True),
        sa.Column("tokenizer_hash", sa.String(), nullable=True),
        sa.Column("provenance", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "noise_floor_nats is null or (noise_floor_nats >= 0 and noise_floor_nats < 'Infinity')",
            name=op.f("ck_vectors_noise"),
        ),
        sa.CheckConstraint("sum_value > '-Infinity' and sum_value < 'Infinity'", name=op.f("ck_vectors_sum_finite")),
        sa.CheckConstraint("unit in ('nats', 'bits_per_byte')", name=op.f("ck_vectors_unit")),
        sa.CheckConstraint("n_ok >= 0 and n_ok <= octet_length(statuses)", name=op.f("ck_vectors_n_ok")),
        sa.CheckConstraint(
            "octet_length(log_likelihoods) = 4 * octet_length(statuses)", name=op.f("ck_vectors_lengths")
        ),
        sa.CheckConstraint(
            "octet_length(token_counts) = 4 * octet_length(statuses)", name=op.f("ck_vectors_token_lengths")
        ),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_vectors_model_id_models")),
        sa.ForeignKeyConstraint(["text_set_id"], ["text_sets.id"], name=op.f("fk_vectors_text_set_id_text_sets")),
        sa.ForeignKeyConstraint(["transform_id"], ["transforms.id"], name=op.f("fk_vectors_transform_id_transforms")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_vectors")),
        sa.UniqueConstraint(
            "model_id",
            "text_set_id",
            "transform_id",
            "profile",
            "dtype",
            "engine_version",
            name="uq_vectors_point",
        ),
    )
    op.create_index(
        "ix_vectors_space", "vectors", ["text_set_id", "transform_id", "profile", "unit", "id"], unique=False
    )
    op.create_table(
        "leases",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_leases_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_leases")),
    )
    op.create_table(
        "shards",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("transform_id", sa.BigInteger(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Integer(), nullable=False),
        sa.Column("log_likelihoods", sa.LargeBinary(), nullable=False),
        sa.Column("statuses", sa.LargeBinary(), nullable=False),
        sa.Column("token_counts", sa.LargeBinary(), nullable=False),
        sa.Column("notes", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("start >= 0 and stop > start", name=op.f("ck_shards_slice")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["transform_id"], ["transforms.id"], name=op.f("fk_shards_transform_id_transforms")),
        sa.PrimaryKeyConstraint("job_id", "transform_id", "start", name=op.f("pk_shards")),
    )
    for table, columns in EXTERNAL.items():
        for column in columns:
            op.execute(f"alter table {table} alter column {column} set storage external")


def downgrade() -> None:
    op.drop_table("shards")
    op.drop_table("leases")
    op.drop_index("ix_vectors_space", table_name="vectors")
    op.drop_table("vectors")
    op.drop_table("texts")
    op.drop_index(op.f("ix_text_set_names_text_set_id"), table_name="text_set_names")
    op.drop_table("text_set_names")
    op.drop_index(op.f("ix_model_tags_tag"), table_name="model_tags")
    op.drop_table("model_tags")
    op.drop_index(op.f("ix_model_aliases_model_id"), table_name="model_aliases")
    op.drop_table("model_aliases")
    op.drop_index("uq_jobs_active_key", table_name="jobs", postgresql_where=sa.text("state in ('queued', 'running')"))
    op.drop_index(op.f("ix_jobs_model_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_key"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index("ix_evidence_b_id", table_name="evidence")
    op.drop_table("evidence")
    op.drop_table("transforms")
    op.drop_table("text_sets")
    op.drop_index("ix_models_weights_hash", table_name="models")
    op.drop_index("ix_models_handle_key", table_name="models")
    op.drop_table("models")
    op.drop_index(op.f("ix_alias_events_alias"), table_name="alias_events")
    op.drop_table("alias_events")
