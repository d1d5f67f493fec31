"""Rows of datasets, one at a time: of a file, a folder or the hub; renamed and filtered as a config says."""
