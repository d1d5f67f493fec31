"""Rows of datasets, read one at a time from a file, a folder or the hub; renamed and filtered as a config says."""
