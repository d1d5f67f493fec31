"""Several queries as one look at the store: one connection, one state of its rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workflow.store.reads.run_rows import run_name

if TYPE_CHECKING:
    from agentrl.workflow.store.connect import Database

T = TypeVar("T")


class TransactionReader:
    """A transaction that takes the place of a database, so that each query runs inside it."""

    def __init__(self, tx: Any) -> None:
        """Take an open read transaction."""
        self.tx = tx

    def ask(self, query: Callable[[Any], T]) -> T:
        """Runs `query` in the transaction."""
        return query(self.tx)

    def full_database(self) -> "Database":
        """Never needed: every query of the page is plain SQL."""
        raise NotImplementedError


def look(store: ReadOnlyStore, query: Callable[[TransactionReader], T]) -> T:
    """Return what `query` finds in one transaction. Raises as `ReadOnlyStore.ask` and the query do."""
    return store.ask(lambda tx: query(TransactionReader(tx)))


def look_at_run(store: ReadOnlyStore, run: int, query: Callable[[TransactionReader, str], T]) -> T:
    """Return what `query` finds of the run of that number, by its name, in one transaction.

    Raises:
        NotFoundError: there is no such run.
    """
    return store.ask(lambda tx: query(TransactionReader(tx), run_name(tx, run)))
