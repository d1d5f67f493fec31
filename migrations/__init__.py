"""Alembic's migrations of the trajectory database; they travel with the package and need no ini file."""
