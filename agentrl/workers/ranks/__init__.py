"""Ranks: processes beside a train worker that make its updates together, one per device. They never use the database."""
