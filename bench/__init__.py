"""Measurements, one file per subject: `python -m bench [SUBJECT ...]` prints tables and writes `build/bench.json`.

Every number has its spread, what is compared is measured alternately in one run, and the machine's load stands beside it.
"""
