"""The engine over transformers' continuous batching: a paged cache whose pages prompts share, meant for GPUs.

    agentrl submit --engine continuous

It samples from the same published weights as our own engine and takes turns with a trainer of the same process: each call of
the model asks for the policy's lock. Rows of other weights wait until the batch has drained; then the loop is paused, the
weights are changed, and pages that hold keys and values of the old ones are forgotten.

Its draws come from torch's generator, so nothing can be repeated bit for bit. Its logprobs are those of the sampling
temperature over the whole vocabulary as long as nothing is cut off, so top_k and top_p are refused; min_p and stop strings it
does not have. No CUDA graphs: a graph that is replayed asks nobody for the lock.
"""

import secrets
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from logging import getLogger
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from agentrl.workflow.engines import Completion, GenerateRequest, closed, fail, not_a_number
from agentrl.workflow.errors import ConfigError, InfraError, ModelError
from agentrl.workflow.models.memory import out_of_memory
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef

log = getLogger("agentrl.continuous")

PAGE_TOKENS = 64
"""Siblings share the pages that their common prompt fills."""

BATCH_TOKENS = 2048
"""Prompt tokens in one call of the model: they pay for activations and for a mask as wide as the cache."""

CPU_TOKENS = 16384
"""Tokens whose keys and values are kept at once on a CPU; of a GPU half of the free memory is taken, for a trainer may come."""

LOOK_SECONDS = 0.2
"""How often the engine looks whether it was closed while rows are live."""


def start(policy: Policy, settings: Settings) -> "ContinuousEngine":
    """The engine as the machine's settings ask for it.

    Raises:
        ConfigError: the model computes in a way that the paged cache cannot.
        InfraError: there is no memory for the cache.
    """
    return ContinuousEngine(policy, settings.slots)


@dataclass(slots=True)
class _Row:
    request: GenerateRequest
    future: Future[Completion]
    limit: int


class _Published:
    """The published weights in the shape of a transformers model; each call holds the policy's lock."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        with policy.sampling() as model:
            self._model: Any = model.get_base_model() if policy.kind == "lora" else model  # type: ignore[operator]
        self.nan = torch.zeros((), dtype=torch.bool, device=policy.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def eval(self) -> "_Published":
        """As it is: `Policy.sampling` sees to that."""
        return self

    def __call__(self, **batch: Any) -> Any:
        with self._policy.sampling():
            output = self._model(**batch)
        # Kept on the device, where a NaN among the probabilities would end the whole process; read when a row ends.
        self.nan |= output.logits.isnan().any()
        output.logits = output.logits.nan_to_num()
        return output


class ContinuousEngine:
    """Samples from a `Policy`'s published weights.

    Args:
        policy: its lock is held during each call of the model, and only then.
        slots: rows that are live at once, at most; the others wait in order.

    Raises:
        ConfigError: the model computes in a way that the paged cache cannot.
        InfraError: there is no memory for the cache.
    """

    def __init__(self, policy: Policy, slots: int = 128) -> None:
        self._policy = policy
        self._limit = slots
        self._model = _Published(policy)
        self._manager: ContinuousBatchingManager | None = self._begin()
        self._weights: tuple[str, str] | None = None
        self._numbers = count()
        self._waiting: deque[_Row] = deque()
        self._live: dict[str, _Row] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="continuous", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Asks for one completion. A prompt that fills the context ends at once as `length`, with nothing sampled.

        The future raises ModelError (ids outside the vocabulary, NaN from the model), ConfigError (an option that this
        engine has not), CheckpointError (weights that cannot be published) or InfraError (the model call failed, the
        sampler was closed).
        """
        row = _Row(request, Future(), min(request.max_new_tokens, self._window - len(request.prompt_ids)))
        vocabulary = int(self._model.config.vocab_size)
        if not request.prompt_ids or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            row.future.set_exception(ModelError(f"A prompt needs ids between 0 and {vocabulary - 1}, and at least one."))
        elif request.top_k or request.top_p < 1 or request.min_p or request.stop:
            said = "The engine 'continuous' honours none of top_k, top_p, min_p and stop."
            row.future.set_exception(ConfigError(said, "Use --engine rolling."))
        elif row.limit < 1:
            row.future.set_result(Completion((), (), "length", 0.0))
        else:
            self._enqueue(row)
        return row.future

    def release(self, key: int | None = None) -> None:
        """Nothing is kept for an episode but pages, which go when others need them; the cache itself stays."""

    def close(self) -> None:
        """Ends the threads; what is waiting or live fails with InfraError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _enqueue(self, row: _Row) -> None:
        with self._changed:
            if self._closed:
                row.future.set_exception(closed())
            elif self._live and not self._waiting and row.request.policy.weights == self._weights:
                self._add(row)
            else:
                self._waiting.append(row)
                self._changed.notify()

    # the loop of transformers

    def _begin(self) -> ContinuousBatchingManager:
        cpu = self._policy.device.type == "cpu"
        tokens = max(CPU_TOKENS, self._policy.max_context + PAGE_TOKENS)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-tokens // PAGE_TOKENS) if cpu else None,
            max_memory_percent=None if cpu else 0.5,
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=self._limit,
            return_logprobs=True,
            per_request_processors=True,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,  # the trainer computes with the same modules
            seed=secrets.randbits(32),
        )
        # Any temperature but 1, for which there would be nothing to set per request.
        sampling = GenerationConfig(do_sample=True, temperature=0.5, top_k=0, top_p=1.0)  # type: ignore[no-untyped-call]
        try:
            manager = ContinuousBatchingManager(self._model, sampling, config)  # type: ignore[arg-type]
            manager.warmup()  # takes the memory
        except ValueError as error:
            raise ConfigError(f"Continuous batching cannot run this model: {error}.", "Use --engine rolling.") from error
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            said = f"There is no memory for the cache of continuous batching: {error}."
            raise InfraError(said, "Free some, or use --engine rolling.") from error
        assert manager.batch_processor is not None
        self._window = min(self._policy.max_context, manager.batch_processor.cache.max_tokens_read)
        return manager

    def _add(self, row: _Row) -> None:
        if not row.future.running() and not row.future.set_running_or_notify_cancel():
            return
        name = str(next(self._numbers))
        self._live[name] = row
        assert self._manager is not None
        self._manager.add_request(
            list(row.request.prompt_ids),
            request_id=name,
            max_new_tokens=row.limit,
            eos_token_id=sorted(self._policy.chat.end_ids),
            temperature=float(row.request.temperature),
        )

    # our own

    def _run(self) -> None:
        try:
            self._running()
            while self._wait():
                if self._live:
                    self._collect()
                else:
                    self._admit()
        finally:  # whatever ends the thread, nobody waits for it any longer
            with self._changed:
                self._closed = True
                _fail([*self._live.values(), *self._waiting], closed())
            if self._manager is not None:
                self._manager.stop(hard_stop=True)

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting or self._live))
            return not self._closed

    def _admit(self) -> None:
        """Nothing is live: all that want the weights of the first in line go together."""
        with self._changed:
            ref = self._waiting[0].request.policy
            rows = [row for row in self._waiting if row.request.policy.weights == ref.weights]
            self._waiting = deque(row for row in self._waiting if row.request.policy.weights != ref.weights)
        try:
            manager = self._running()
            if self._weights != ref.weights:
                self._change(manager, ref)
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these rows, and the others go on
            _fail(rows, error)
            return
        with self._changed:
            for row in rows:
                self._add(row)

    def _running(self) -> ContinuousBatchingManager:
        """The loop; a new one where the last broke, however often that fails."""
        if self._manager is None:
            self._manager = self._begin()
        if not self._manager.is_running():
            self._manager.start()  # here, for its thread is a daemon, as a process that is to end needs it, if this one is
        return self._manager

    def _change(self, manager: ContinuousBatchingManager, ref: PolicyRef) -> None:
        self._weights = None
        with manager.pause():
            self._policy.publish(ref)
            assert manager.batch_processor is not None
            manager.batch_processor.cache.reset()  # else a prompt that is known is read with the old weights
            self._model.nan.zero_()
        self._weights = ref.weights

    def _collect(self) -> None:
        assert self._manager is not None
        result = self._manager.get_result(timeout=LOOK_SECONDS)
        if result is None and self._manager.is_running():
            return
        if result is None or result.error is not None:
            self._recover(self._manager, "" if result is None else str(result.error))
            return
        with self._changed:
            row = self._live.pop(result.request_id)
        if bool(self._model.nan):
            row.future.set_exception(not_a_number())
            return
        ended = result.generated_tokens[-1] in self._policy.chat.end_ids
        seconds = result.lifespan[1] - result.lifespan[0]
        ids, logprobs = tuple(result.generated_tokens), tuple(result.logprobs)
        row.future.set_result(Completion(ids, logprobs, "stop" if ended else "length", seconds))

    def _recover(self, manager: ContinuousBatchingManager, said: str) -> None:
        """The loop is broken: its rows fail, or go on with half as many at once where memory ran out, on a new loop."""
        manager.stop(hard_stop=True)
        error = _bare(manager.background_thread_status.fatal_error) or RuntimeError(said)
        with self._changed:
            rows = list(self._live.values())
            self._live.clear()
            self._weights = None
            if out_of_memory(error) and len(rows) > 1:
                self._limit = max(1, min(self._limit, len(rows)) // 2)
                log.warning("memory ran out with %d rows: %d at once from now on", len(rows), self._limit)
                self._waiting.extendleft(reversed(rows))
            else:
                _fail(rows, error)
        self._manager = None


def _bare(error: Exception | None) -> Exception | None:
    """The error without what was in the frames that it ended: they hold the cache."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__
    return error


def _fail(rows: Sequence[_Row], error: Exception) -> None:
    fail((row.future for row in rows), error)
