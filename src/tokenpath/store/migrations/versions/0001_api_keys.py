"""API keys.

``AUTOINCREMENT`` keeps ids from ever being used twice. Rows are never deleted: that a key was
ever created is what keeps a server closed after its last key is revoked.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table of keys."""
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("sha256", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("created_at", sa.Integer, nullable=False),
        sa.Column("revoked_at", sa.Integer),
        sa.Column("last_used_at", sa.Integer),
        sqlite_autoincrement=True,
    )
    op.create_index("api_keys_by_prefix", "api_keys", ["prefix"])
