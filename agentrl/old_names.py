"""Modules under the names that they had before they stood in rooms: `workflow.losses` is `agentrl.workflow.training.losses`.

What a person wrote against the old names goes on working for one release: an import of one gives the module itself, under its
one name, and warns. The code of rewards is hashed as it was spelled with them, so that no stored run's code has changed.
"""

import re
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "workflow"
_FOLDERS = ("workflow", "workers", "cli", "migrations")
"""What lies at the top of a checkout, and must be taken for nobody's own packages of such names."""

_ROOMS = {
    "chat": "chat=rendering probing=template_probe stops=stop_strings templates turns=parsing",
    "": "calls=call_json engine=engines",
    "models": (
        "base=loading critic forward=fast_forward lm_head memory models=lookup packed=packed_weights parameters "
        "plain=exported_files policy scoring=logprobs tiny"
    ),
    "runtime": "faults garbage=gc_pause hub once=lazy patience warm=warm_processes webpage=html_text within=time_limit",
    "training": (
        "advantages batch conversations=demonstrations crediting=token_layout dpo=preference "
        "interrupted=offline_checkpoint lines=packing losses merging moments=optimizer offline=offline_training "
        "pieces=oom_backoff reading=row_scorer schedules sft=supervised trainer trl_options trl_trainer "
        "updates=reports"
    ),
    "checkpoints": (
        "checkpoint=sealed_folder collect=checkpoint_gc epochs=epoch_links mirror=checkpoint_cache remote=object_store"
    ),
    "inference": (
        "adapters=exported_adapters answers=responses connection=http "
        "decoding=rolling_batch drafts=turns llamacpp=llamacpp_engine openai=openai_engine opened=open_policy "
        "rolling=rolling_engine sampling served=remote_engine slots=kv_cache streaming"
    ),
    "stats": "dynamic=group_variance evaluate=evaluation harvest=selection paired=paired_test",
    "analysis": "compare=episode_diff replay=verify_episode rescoring=verify_tokens whatif=counterfactual",
    "tables": "columns db=schema meanings=descriptions views",
    "control": "scheduler snapshot",
    "mcp": "mcp=mcp_tool mcp_process=mcp_servers",
    "judging": "asserts=assertions constants judging=code_judge",
    "sql": "databases querying=query_process readonly readonly_postgres",
    "store": (
        "calls=tool_calls claims=train_claims compact=vacuum epochs=epoch_ends family=reads.lineage keeping=retention "
        "ledger=reads.ledger lost=lost_workers mending=repair named=run_names offline=offline_data "
        "origin=reads.provenance past=reads.update_inputs prepared=prepared_statements query=reads.user_sql "
        "reader=driver_reader results=reads.eval_results rollout=rollout_claims scoring=reward_sets "
        "serving=control_reads sessions=tool_sessions training=train_commits values=row_values waiting=waiting_runs"
    ),
    "sandbox": "plain=exact_json seats=uid_pool turns=fair_semaphore watch=limits_watch",
}
"""Room -> its modules, `old=new` where the name changed too. Those of `store` and `sandbox` were there before."""

_RESPELLED = {r"""|\)(?=[-+*/^]))+"  # sqrt(2), (1)-2""": r"""|\)(?=[-+*/^]))++"  # sqrt(2), (1)-2"""}
"""What was written in another way, for Pythons before 3.11.5 whose `re` is wrong about it -> as it was."""
_KEPT = ("store", "sandbox")
_OLD = {
    (f"{room}.{old}" if room in _KEPT else old): ".".join(filter(None, (room, new or old)))
    for room, modules in _ROOMS.items()
    for old, _, new in (module.partition("=") for module in modules.split())
}
_NEW = {new: old for old, new in _OLD.items()}


def new_name(name: str) -> str:
    """Where the module `workflow.NAME` is now."""
    rest = name.removeprefix(PACKAGE).removeprefix(".")
    return ".".join(filter(None, (f"agentrl.{PACKAGE}", _OLD.get(rest, rest))))


def now(loaded: str) -> str:
    """The one name of a module that was imported, by whichever name."""
    module = sys.modules[loaded]
    return new_name(loaded) if isinstance(module, _Package) else module.__name__


class _Package(ModuleType):
    """A package under its old name: what is below it has old names too, everything else is the package's."""

    __all__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}".removeprefix(f"{PACKAGE}.") in _OLD:  # some have a room's name by now
            return import_module(f"{self.__name__}.{name}")
        return getattr(sys.modules[new_name(self.__name__)], name)


class _Finder(MetaPathFinder, Loader):
    """Finds `workflow` and what is below it, unless a person has a package of that name: then, and for others, theirs."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in _FOLDERS:
            return None
        if fullname == root:
            theirs = _find_theirs(root)
            if root != PACKAGE or (theirs and theirs.origin):
                return theirs
            spec = ModuleSpec(root, self, is_package=True)
            if theirs and theirs.submodule_search_locations:  # of a folder without an `__init__.py`, which hides nothing
                spec.submodule_search_locations = [*theirs.submodule_search_locations]
            return spec
        if not isinstance(sys.modules[root], _Package):
            return None
        real = find_spec(new_name(fullname))
        return ModuleSpec(fullname, self, is_package=real.submodule_search_locations is not None) if real else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.submodule_search_locations is None else _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        real = import_module(new_name(module.__name__))
        if module.__name__ != PACKAGE:
            said = f"{module.__name__} is {real.__name__} by now; the old name goes with the next release."
            warnings.warn(said, FutureWarning, stacklevel=2)
        if isinstance(module, _Package):
            module.__all__ = [name for name in vars(real) if not name.startswith("_")]
        else:
            sys.modules[module.__name__] = real  # one module, whatever it is called


def _find_theirs(root: str) -> ModuleSpec | None:
    """A person's own package of that name, wherever Python finds it."""
    places = [place for place in sys.path if isinstance(place, str) and not _is_ours(Path(place, root))]
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and (found := finder.find_spec(root, places if finder is PathFinder else None)):
            return found
    return None


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of a checkout, this one or another, in which `agentrl` has a link to it."""
    try:
        return folder.samefile(folder.resolve().parent / "agentrl" / folder.name)
    except OSError:
        return False


def install() -> None:
    """From now on the old names can be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@lru_cache(maxsize=128)
def spelled_before(source: str) -> str:
    """The source of a module of ours with its imports, and what it calls their modules, as before the rooms.

    A line of `_RESPELLED`, too, is as it was: it means what it meant.
    """
    for now_spelled, before in _RESPELLED.items():
        source = source.replace(now_spelled, before)
    renamed: dict[str, str] = {}

    def imported(line: re.Match[str]) -> str:
        indent, room, names, lines = line[1], line[2], [], []
        for name in line[3].split(", "):
            module = _NEW.get(f"{room}.{name}".lstrip("."))
            if module is None:
                names.append(name)
                continue
            folder, _, old = module.rpartition(".")
            renamed[name] = old
            if folder == room:
                names.append(old)
            else:
                lines.append(f"from {'.'.join(filter(None, (PACKAGE, folder)))} import {old}")
        if names:
            lines.append(f"from {'.'.join(filter(None, (PACKAGE, _NEW.get(room, room))))} import {', '.join(names)}")
        return "\n".join(indent + each for each in lines)

    source = re.sub(rf"^( *)from agentrl\.{PACKAGE}\.?([\w.]*) import (.+)$", imported, source, flags=re.MULTILINE)
    for new, old in renamed.items():
        source = re.sub(rf"(?<![\w.]){new}\.(?=\w)", f"{old}.", source)
    return re.sub(rf"(?:^from {PACKAGE}\S* import .+\n)+", _in_order, _named(source), flags=re.MULTILINE)


def _in_order(lines: re.Match[str]) -> str:
    return "".join(sorted(lines[0].splitlines(keepends=True), key=lambda line: line.split()[1]))


def _named(source: str) -> str:
    """With the modules that comments name."""
    return re.sub(r"`(\w+(?:\.\w+)+)`", lambda name: f"`{PACKAGE}.{_NEW[name[1]]}`" if name[1] in _NEW else name[0], source)
