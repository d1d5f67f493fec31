"""Judging of code: parses tests from their source, and checks values that model-written code returned."""
