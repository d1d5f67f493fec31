"""Published adapters where a server reads them: PEFT's `adapter_config.json` beside `adapter_model.safetensors`.

A checkpoint may be at a URL, an older one has no config, and none stays for the server's sake; so this is a copy. It is made in
`AGENTRL_HOME/cache/adapters/SHA256`; whoever is to load it from there, a server that samples, must see it at the same path.
"""

import os
import shutil
import tempfile
from pathlib import Path

from agentrl.workflow.checkpoints import checkpoint_cache
from agentrl.workflow.checkpoints.sealed_folder import ADAPTER, sha256_file
from agentrl.workflow.models.exported_files import adapter_config
from agentrl.workflow.models.policy import Policy, checked_weights
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef

KEEP = 16
"""Folders that stay: servers read an adapter again where their own memory for adapters is short."""


def exported_folder(policy: Policy, ref: PolicyRef) -> Path:
    """The adapter of a trained policy, in a folder that PEFT and vLLM load.

    Raises:
        CheckpointError: the checkpoint is missing, or was altered since its sha256 was recorded.
        ServiceError: it is kept at a URL that does not answer.
    """
    target = settings().cache_dir / "adapters" / ref.sha256
    with checkpoint_cache.hold_lock(
        target.parent
    ):  # else what another process made meanwhile is removed under the server's eyes
        if not _is_sound(target, ref.sha256):
            shutil.rmtree(target, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
                _write(policy, ref, Path(scratch) / "adapter")
                (Path(scratch) / "adapter").rename(target)
            _evict(target.parent)
        os.utime(target)
    return target


def _write(policy: Policy, ref: PolicyRef, made: Path) -> None:
    made.mkdir()

    def copy(checkpoint: Path) -> None:
        shutil.copyfile(checked_weights(checkpoint, ref.sha256), made / ADAPTER)

    checkpoint_cache.read(ref.path, ref.sha256, "weights", copy)
    adapter_config(policy).save_pretrained(str(made))


def _is_sound(made: Path, sha256: str) -> bool:
    """Whether it is there whole: a power failure may have left a part."""
    files = (made / ADAPTER, made / "adapter_config.json")
    return all(file.is_file() for file in files) and sha256_file(files[0]) == sha256


def _evict(parent: Path) -> None:
    made = [entry for entry in parent.iterdir() if not entry.name.startswith(".")]
    for old in sorted(made, key=lambda entry: entry.stat().st_mtime_ns)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
