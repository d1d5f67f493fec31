"""The contents of the page's responses. Each response is built in one read transaction; long texts are shortened, and tokens
get their texts.
"""
