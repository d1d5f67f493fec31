"""Rows of datasets: read one at a time from a file, a folder or the hub, then renamed and filtered as the config says."""
