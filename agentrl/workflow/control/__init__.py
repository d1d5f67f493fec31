"""What is to be done next, decided from rows alone."""
