"""Judging of code: tests parsed from their source, and checks of values that model-written code returned."""
