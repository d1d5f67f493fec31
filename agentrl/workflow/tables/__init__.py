"""The database schema: tables, views, and the meanings of their columns. Only the store and the migrations import it."""
