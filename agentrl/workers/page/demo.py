"""The demo of the page: a small finished run that the package contains. `make demo` made the run; the page shows a copy of its
store.
"""

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
"""The name of the model of the demo's runs. Only the tokenizer of this model is included."""


def open_demo() -> Settings:
    """Return settings of a temporary, upgraded copy of the demo's store. Raise NotFoundError if the installation contains no
    demo.
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
