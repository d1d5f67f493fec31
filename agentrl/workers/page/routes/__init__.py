"""The routes of the page, and the schemas of their answers."""
