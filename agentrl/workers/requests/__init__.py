"""The requests of commands. Each request is checked completely before anything is written to the database."""
