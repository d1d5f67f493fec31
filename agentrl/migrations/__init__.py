"""Alembic's migrations of the trajectory database; they travel with the package and need no ini file."""

from agentrl.checkout_links import alias

if __name__ == "migrations":  # imported through the link at the top of a checkout
    alias(__name__)
