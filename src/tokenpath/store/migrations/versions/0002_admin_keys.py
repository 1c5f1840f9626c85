"""Keys that may operate the server. Those that exist may not: nobody gains power by an upgrade."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the mark."""
    column = sa.Column("admin", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("api_keys", column)
