"""Questions about what is stored: is it true, where do episodes part, what would another algorithm do."""
