"""An algorithm whose import counts, in a rank, the files of checkpoints that the rank compares with their manifest."""

import os
from pathlib import Path

import torch.distributed as dist

from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.checkpoints import sealed_folder

LOG = "checks"
"""The file in the data folder with a line for each comparison: the number of the rank, and the name of the file."""

_sha256_file = sealed_folder.sha256_file
counted = grpo


def _log_and_hash(file: Path) -> str:
    if dist.is_initialized():
        with (Path(os.environ["AGENTRL_HOME"]) / LOG).open("a") as log:
            log.write(f"{dist.get_rank()} {file.name}\n")
    return _sha256_file(file)


sealed_folder.sha256_file = _log_and_hash
