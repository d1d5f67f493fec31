"""Exports of published adapters for a server: folders with PEFT's `adapter_config.json` and `adapter_model.safetensors`.

The adapter is copied from its checkpoint for three reasons: the checkpoint may be at a URL, the checkpoint may be old and lack
the config, and `agentrl gc` may remove the checkpoint while the server needs the adapter. The copy is in
`AGENTRL_HOME/cache/adapters/SHA256`. The server must see this folder at the same path.
"""

import os
import shutil
import tempfile
from pathlib import Path

from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import ADAPTER, sha256_file
from agentrl.workflow.models.exported_files import adapter_config
from agentrl.workflow.models.policy import Policy, checked_weights
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef

KEEP = 16
"""The number of exports that stay on disk. A server that removed an adapter from its memory reads the export again."""


def exported_folder(policy: Policy, ref: PolicyRef) -> Path:
    """Return a folder with the adapter of a trained policy, in the format of PEFT and vLLM. Make the folder if it does not
    exist.

    Raises:
        CheckpointError: the checkpoint is missing, or has changed since its sha256 was recorded.
        ServiceError: the checkpoint is at a URL that does not respond.
    """
    target = settings().cache_dir / "adapters" / ref.sha256
    with checkpoints.hold_lock(target.parent):  # locked, so that no other process's export is removed while the server reads it
        if not _is_sound(target, ref.sha256):
            shutil.rmtree(target, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
                _write(policy, ref, Path(scratch) / "adapter")
                (Path(scratch) / "adapter").rename(target)
            _evict(target.parent)
        os.utime(target)
    return target


def _write(policy: Policy, ref: PolicyRef, folder: Path) -> None:
    folder.mkdir()

    def copy(checkpoint: Path) -> None:
        shutil.copyfile(checked_weights(checkpoint, ref.sha256), folder / ADAPTER)

    checkpoints.read(ref.path, ref.sha256, "weights", copy)
    adapter_config(policy).save_pretrained(str(folder))


def _is_sound(folder: Path, sha256: str) -> bool:
    """Return True if the export is complete. After a power failure, an export may be incomplete."""
    files = (folder / ADAPTER, folder / "adapter_config.json")
    return all(file.is_file() for file in files) and sha256_file(files[0]) == sha256


def _evict(parent: Path) -> None:
    exports = [entry for entry in parent.iterdir() if not entry.name.startswith(".")]
    for old in sorted(exports, key=lambda entry: entry.stat().st_mtime_ns)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
