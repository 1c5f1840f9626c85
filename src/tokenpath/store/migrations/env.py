"""How Alembic runs the migrations: on the connection, and in the transaction, of the caller.

``store/database.py`` is the only caller; there is no ``alembic.ini`` and no offline mode.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
