"""text_to_sql: 60 questions about the database of an invented bookshop (`bookshop.sql`); every fifth is held out.

A task's reference is a query. For your own tasks, set `reference` to a query, and `metadata["database"]` to a SQLite file, a
.sql script or a postgresql:// URL.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Task

FOLDER = Path(__file__).parent
DATABASE = "bookshop.sql"
HELD_OUT = 5
SPLITS = ("train", "test")

SOLD = "orders o JOIN books b ON b.id = o.book_id"
BY_AUTHOR = "books b JOIN authors a ON a.id = b.author_id"
BOUGHT = "orders o JOIN customers c ON c.id = o.customer_id"

QUESTIONS = (
    ("How many books are there?", "SELECT count(*) FROM books"),
    ("What are the names of all authors?", "SELECT name FROM authors"),
    ("Which genres are there?", "SELECT DISTINCT genre FROM books"),
    ("What is the price of the most expensive book?", "SELECT max(price) FROM books"),
    ("How many pages has the shortest book?", "SELECT min(pages) FROM books"),
    ("What are the titles of all books of poetry?", "SELECT title FROM books WHERE genre = 'poetry'"),
    ("Which customers live in Lisbon? Give their names.", "SELECT name FROM customers WHERE city = 'Lisbon'"),
    ("How many customers live in Oslo?", "SELECT count(*) FROM customers WHERE city = 'Oslo'"),
    ("What is the average price of a book?", "SELECT avg(price) FROM books"),
    ("Which authors were born before 1950? Give their names.", "SELECT name FROM authors WHERE born < 1950"),
    ("What are the titles of books with more than 400 pages?", "SELECT title FROM books WHERE pages > 400"),
    ("How many orders were there?", "SELECT count(*) FROM orders"),
    ("How many copies were sold in all orders together?", "SELECT sum(quantity) FROM orders"),
    ("How many books does each genre have? Give genre and number.", "SELECT genre, count(*) FROM books GROUP BY genre"),
    ("What is the average price in each genre? Give genre and price.", "SELECT genre, avg(price) FROM books GROUP BY genre"),
    ("How many customers live in each city? Give city and number.", "SELECT city, count(*) FROM customers GROUP BY city"),
    ("In which cities do more than 3 customers live?", "SELECT city FROM customers GROUP BY city HAVING count(*) > 3"),
    ("What are all titles in alphabetical order?", "SELECT title FROM books ORDER BY title"),
    ("Give the names of the customers by the day they joined, the first first.", "SELECT name FROM customers ORDER BY joined"),
    (
        "What are the 5 dearest books? Give title and price, the dearest first; of equal prices by title.",
        "SELECT title, price FROM books ORDER BY price DESC, title LIMIT 5",
    ),
    (
        "What are the 3 longest books? Give title and pages, the longest first; of equal length by title.",
        "SELECT title, pages FROM books ORDER BY pages DESC, title LIMIT 3",
    ),
    ("Who is the youngest author? Give the name.", "SELECT name FROM authors WHERE born = (SELECT max(born) FROM authors)"),
    ("What are the titles of books that cost less than 10?", "SELECT title FROM books WHERE price < 10"),
    ("How many books cost from 10 to 20?", "SELECT count(*) FROM books WHERE price BETWEEN 10 AND 20"),
    (
        "Which books were published before 1960? Give title and year.",
        "SELECT title, published FROM books WHERE published < 1960",
    ),
    ("How many books were published since 2000?", "SELECT count(*) FROM books WHERE published >= 2000"),
    ("What are the titles that contain the word 'Garden'?", "SELECT title FROM books WHERE title LIKE '%Garden%'"),
    ("From which countries are the authors?", "SELECT DISTINCT country FROM authors"),
    (
        "How many authors are from each country? Give country and number.",
        "SELECT country, count(*) FROM authors GROUP BY country",
    ),
    ("What is the title and the author's name of every book?", f"SELECT b.title, a.name FROM {BY_AUTHOR}"),
    (
        "How many books has each author written? Give name and number, also of those without one.",
        "SELECT a.name, count(b.id) FROM authors a LEFT JOIN books b ON b.author_id = a.id GROUP BY a.id",
    ),
    (
        "Which authors have no book here? Give their names.",
        "SELECT name FROM authors WHERE id NOT IN (SELECT author_id FROM books)",
    ),
    (
        "Which authors have more than 4 books? Give their names.",
        f"SELECT a.name FROM {BY_AUTHOR} GROUP BY a.id HAVING count(*) > 4",
    ),
    ("What are the titles by authors from Japan?", f"SELECT b.title FROM {BY_AUTHOR} WHERE a.country = 'Japan'"),
    (
        "What is the average price of the books by authors of each country? Give country and price.",
        f"SELECT a.country, avg(b.price) FROM {BY_AUTHOR} GROUP BY a.country",
    ),
    (
        "Which authors have written crime? Give each name once.",
        f"SELECT DISTINCT a.name FROM {BY_AUTHOR} WHERE b.genre = 'crime'",
    ),
    ("What did all orders together bring in?", f"SELECT sum(o.quantity * b.price) FROM {SOLD}"),
    (
        "What did each genre bring in? Give genre and sum.",
        f"SELECT b.genre, sum(o.quantity * b.price) FROM {SOLD} GROUP BY b.genre",
    ),
    (
        "How many copies of each book were sold? Give title and number, only of those that were.",
        f"SELECT b.title, sum(o.quantity) FROM {SOLD} GROUP BY b.id",
    ),
    (
        "Which books were never ordered? Give their titles.",
        "SELECT title FROM books WHERE id NOT IN (SELECT book_id FROM orders)",
    ),
    (
        "Which customers never ordered? Give their names.",
        "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)",
    ),
    (
        "How many orders did each customer make? Give name and number, only of those who did.",
        f"SELECT c.name, count(*) FROM {BOUGHT} GROUP BY c.id",
    ),
    (
        "Which customers made at least 8 orders? Give their names.",
        f"SELECT c.name FROM {BOUGHT} GROUP BY c.id HAVING count(*) >= 8",
    ),
    (
        "How many copies were sold to each city? Give city and number.",
        f"SELECT c.city, sum(o.quantity) FROM {BOUGHT} GROUP BY c.city",
    ),
    ("How many orders were made in 2023?", "SELECT count(*) FROM orders WHERE ordered LIKE '2023-%'"),
    (
        "How many orders were made in each month of 2024? Give the month as 2024-01 and the number, in order.",
        "SELECT substr(ordered, 1, 7) AS month, count(*) FROM orders WHERE ordered >= '2024' GROUP BY month ORDER BY month",
    ),
    ("What was the day of the first order?", "SELECT min(ordered) FROM orders"),
    (
        "What are the days on which more than one order was made?",
        "SELECT ordered FROM orders GROUP BY ordered HAVING count(*) > 1",
    ),
    (
        "Which books cost more than the average? Give title and price.",
        "SELECT title, price FROM books WHERE price > (SELECT avg(price) FROM books)",
    ),
    (
        "What is the dearest book of each genre? Give genre and price.",
        "SELECT genre, max(price) FROM books GROUP BY genre",
    ),
    (
        "How many different books has each customer ordered? Give name and number, only of those who did.",
        f"SELECT c.name, count(DISTINCT o.book_id) FROM {BOUGHT} GROUP BY c.id",
    ),
    ("Which customers joined in 2020? Give their names.", "SELECT name FROM customers WHERE joined LIKE '2020-%'"),
    (
        "Which customers have ordered poetry? Give each name once.",
        f"SELECT DISTINCT c.name FROM {BOUGHT} JOIN books b ON b.id = o.book_id WHERE b.genre = 'poetry'",
    ),
    (
        "How many copies were sold of books by authors from Norway?",
        f"SELECT sum(o.quantity) FROM {SOLD} JOIN authors a ON a.id = b.author_id WHERE a.country = 'Norway'",
    ),
    (
        "Whose books sold best? Give the names and copies of the first 3 authors, the best first; of equals by name.",
        f"SELECT a.name, sum(o.quantity) AS sold FROM {SOLD} JOIN authors a ON a.id = b.author_id "
        "GROUP BY a.id ORDER BY sold DESC, a.name LIMIT 3",
    ),
    (
        "Which 3 customers have spent most? Give names and sums, the largest first; of equals by name.",
        f"SELECT c.name, sum(o.quantity * b.price) AS spent FROM {BOUGHT} JOIN books b ON b.id = o.book_id "
        "GROUP BY c.id ORDER BY spent DESC, c.name LIMIT 3",
    ),
    ("How many pages do all novels have together?", "SELECT sum(pages) FROM books WHERE genre = 'novel'"),
    ("What is the largest number of copies in one order?", "SELECT max(quantity) FROM orders"),
    (
        "Which orders were of 5 copies? Give the order's id and the customer's name.",
        f"SELECT o.id, c.name FROM {BOUGHT} WHERE o.quantity = 5",
    ),
    (
        "What is the price per page of each history book? Give title and price per page.",
        "SELECT title, price / pages FROM books WHERE genre = 'history'",
    ),
)


def load(split: str) -> Iterator[Task]:
    """Yield the questions of `train` or `test`. Raise DatasetError if the split does not exist."""
    if split not in SPLITS:
        raise DatasetError(f"text_to_sql has no split {split!r}.", f"Splits: {', '.join(SPLITS)}.")
    return (
        Task(f"{split}/{number}", (Message("user", question),), query, {"database": DATABASE})
        for number, (question, query) in enumerate(QUESTIONS)
        if (number % HELD_OUT == HELD_OUT - 1) == (split == "test")
    )


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...]]:
    """Yield the answer of each task, with its query. `seed` is not used."""
    return ((*task.messages, Message("assistant", f"```sql\n{task.reference}\n```")) for task in tasks)


text_to_sql = Dataset(load=load, env="text_to_sql", demonstrations=demonstrations)
