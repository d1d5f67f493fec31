"""Judging of code: tests read from their source, and checks of the values that model-written code returned."""
