"""Serves a model as vLLM's module of this name does, with the options that the engine `vllm` passes."""

import argparse
import os
import threading
from pathlib import Path

from tests.support.model_server import served


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("model", "served-model-name", "host", "dtype", "generation-config", "logprobs-mode"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("port", "max-lora-rank", "max-cpu-loras"):
        parser.add_argument(f"--{option}", type=int, required=True)
    for switch in ("enable-lora", "enforce-eager", "no-enable-chunked-prefill"):
        parser.add_argument(f"--{switch}", action="store_true", required=True)
    options = parser.parse_args()
    assert options.logprobs_mode == "processed_logprobs"
    assert options.host == "127.0.0.1"
    folder = Path(options.model)
    if (folder / "broken").exists():
        raise ValueError("the model is broken")
    with served(folder, options.port, key=os.environ["VLLM_API_KEY"]):
        threading.Event().wait()


if __name__ == "__main__":
    main()
