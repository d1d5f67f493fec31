"""A small finished run that comes with the package: `make demo` made it, a copy of it is shown."""

import atexit
import lzma
import shutil
from pathlib import Path
from tempfile import mkdtemp

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.settings import Settings

DATA = Path(__file__).parent / "demo_data"
PACKED = "agentrl.db.xz"
TOKENIZER = "tokenizer.json"
MODEL = "tiny-arithmetic"
"""The model of the runs, of which only the tokenizer comes along."""


def open_demo() -> Settings:
    """Return the settings of a copy of the demo's store, of this code's revision, which goes when the process ends.

    Raises:
        NotFoundError: it did not come with this installation.
    """
    from agentrl.workflow.store.migrate import open_database

    if not (DATA / PACKED).is_file():
        raise NotFoundError("This installation does not contain the demo.", "In a checkout: make demo")
    folder = Path(mkdtemp(prefix="agentrl-demo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    where = Settings(home=folder, database_url="", database_reader_url="")
    with lzma.open(DATA / PACKED) as packed, (folder / "agentrl.db").open("wb") as file:
        shutil.copyfileobj(packed, file)
    model = where.models_dir / MODEL
    model.mkdir(parents=True)
    shutil.copy(DATA / TOKENIZER, model)
    open_database(where.database).close()  # which upgrades it
    return where
