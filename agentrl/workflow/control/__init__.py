"""The next actions, decided from rows alone."""
