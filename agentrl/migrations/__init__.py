"""Alembic's migrations of the trajectory database. They are part of the package and need no ini file."""

if __name__ == "migrations":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.migrations instead.")
