"""Alembic's migrations of the trajectory database; they travel with the package and need no ini file."""

if __name__ != "agentrl.migrations":
    raise ImportError("Import agentrl.migrations: each module has one name.")
