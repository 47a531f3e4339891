"""Many requests on one model: they join a running batch and leave it between steps.

Rows that decode alike (mode, block length, sampling) run as one ragged batch; others take turns, a step each. A row's
answer is that of the same request alone. One thread owns the model but for its vision tower and projector, which one of
their own runs (image_encoder.py), so that rows go on while a newcomer's images are encoded; on a GPU the two share a
stream and take turns. Nobody else may run or change the model meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .admission import Admission
from .conversation import ConversationCache
from .decoders import DECODERS, DecodeState, Step
from .generation import Generation, Row, StreamEvent
from .image_encoder import ImageEncoder
from .lean_forward import LeanForward, lean_forward
from .request import Request, RequestError, wake
from .serving_caches import FeatureCache, PrefixCache
from .waiting import Waiting

if TYPE_CHECKING:
    from .model import TriModeVLM

GIB = 2**30
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits of an engine.

    `kv_bytes`: keys and values of running rows; None is a quarter of the free memory. `max_rows`: rows decoding
    together. `queue_limit`: requests that wait; more are refused. Beside these bytes the features of up to four waiting
    requests are held.
    """

    max_rows: int = 32
    queue_limit: int = 128
    kv_bytes: int | None = None
    prefix_cache_bytes: int = GIB // 2
    feature_cache_bytes: int = GIB // 4


@dataclass
class _Group:
    """Rows that decode alike. Row numbers are the engine's; `rows` leads from them to the request and its row."""

    state: DecodeState
    decoder: Iterator[list[Step]]
    rows: dict[int, tuple[Request, int]]
    most_slots: int  # that its longest row may come to


@dataclass
class EngineStats:
    """Sums since the start; what is running now is in `Engine.stats`."""

    finished: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    forwards: int = 0
    prefill_forwards: int = 0
    steps: int = 0


class Engine:
    """See the module. `submit` from any thread; `close` when done (or use it as a context manager).

    Args:
        on_finish: called in the engine's thread with every request that ended, however it ended.
    """

    def __init__(
        self,
        model: TriModeVLM,
        processor: Any,
        settings: EngineSettings | None = None,
        on_finish: Callable[[Request], None] | None = None,
    ) -> None:
        self.model, self.processor = model, processor
        self.settings = settings or EngineSettings()
        self.on_finish = on_finish
        self.totals = EngineStats()
        self.features = FeatureCache(self.settings.feature_cache_bytes)
        self.prefixes = PrefixCache(self.settings.prefix_cache_bytes, model.config.image_token_id)
        self.admission = Admission(model, self.settings.max_rows, self.settings.kv_bytes)
        self._waiting = Waiting(
            self.settings.queue_limit,
            ImageEncoder(model, self.features, lambda: self._waiting.tell()),
            self.prefixes.num_images,
        )
        self._groups: dict[Hashable, _Group] = {}
        self._next_row = 0
        self._lean: LeanForward | None = None
        self._touched: set[Request] = set()  # whose consumers have news
        self._is_failing = False  # closing without answering what runs or waits
        self._thread = threading.Thread(target=self._run, name="trimode-engine", daemon=True)
        self._thread.start()

    def submit(self, inputs: dict[str, Any], *, timeout_sec: float | None = None, **options: Any) -> Request:
        """Queue a request; returns at once.

        Args:
            inputs: one prompt as the processor gives it: input_ids, attention_mask, pixel_values, image_sizes.
            timeout_sec: from now; the answer so far is kept then.
            options: generate()'s, mode= included.

        Raises:
            ValueError: what generate() refuses, and a prompt with its budget that can never fit.
            QueueFullError: `queue_limit` requests wait.
            RequestError: the engine is closed.
        """
        if len(inputs["input_ids"]) != 1:
            raise ValueError(f"a request is one prompt; input_ids has {len(inputs['input_ids'])} rows")
        generation = self.model.begin_generation(**inputs, tokenizer=self.processor.tokenizer, **options)
        deadline = None if timeout_sec is None else time.perf_counter() + timeout_sec
        request = Request(generation, inputs["input_ids"], self.processor.tokenizer, deadline, self._waiting.tell)
        self.admission.check(generation)
        _ = request.prompt.digests  # hashed here, so that no running row waits for it
        self._waiting.put(request)
        return request

    def check_open(self) -> None:
        """Raise what `submit` would raise now for any request, before work is put into one."""
        self._waiting.check_open()

    @property
    def is_closing(self) -> bool:
        return self._waiting.closed is not None

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs; it does until `close` has ended it."""
        return self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Gauges and sums, ready for JSON."""
        groups = list(self._groups.values())
        return {
            "waiting": len(self._waiting),
            "encoding": self._waiting.num_encoding,
            "running": sum(len(g.rows) for g in groups),
            "kv_bytes": sum(g.state.cache.nbytes for g in groups),
            "kv_bytes_limit": self.admission.kv_bytes,
            "finished": dict(self.totals.finished),
            "tokens": self.totals.tokens,
            "forwards": self.totals.forwards,
            "prefill_forwards": self.totals.prefill_forwards,
            "steps": self.totals.steps,
            "prefix_cache_bytes": self.prefixes.held_bytes,
            "prefix_hit_tokens": self.prefixes.hit_tokens,
            "prefix_miss_tokens": self.prefixes.miss_tokens,
            "feature_cache_bytes": self.features.held_bytes,
            "image_hits": self.features.hits,
            "image_misses": self.features.misses,
        }

    def close(self, drain: bool = False) -> None:
        """End the thread. With `drain`, requests that run or wait are answered first; without, they fail."""
        self._is_failing = self._is_failing or not drain
        self._waiting.close("the engine is shutting down")
        self._thread.join()
        self._waiting.encoder.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The engine's thread.

    def _run(self) -> None:
        torch.get_num_threads()  # a new thread takes over what set_num_threads said only when asked
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as error:  # a fault of the engine itself: whoever waits is told, and nobody else is let in
            logger.exception("the engine has failed")
            self._waiting.close(f"the engine has failed: {type(error).__name__} {error}")
            left = {request for group in self._groups.values() for request, _ in group.rows.values()}
            self._groups.clear()
            for request in left.union(self._waiting.take_all()):
                self._finish(request, error)
            self._wake_consumers()
        finally:
            self._waiting.encoder.stop()

    def _serve(self) -> None:
        while self._waiting.wait(bool(self._groups)):
            self._admit()
            self._wake_consumers()
            self._step_all()

    def _step_all(self) -> None:
        """A round of every group."""
        groups = list(self._groups.items())
        for key, group in groups:
            self._step(key, group)
            self._wake_consumers()
        if len(self._groups) < len(groups):
            self._waiting.tell()  # of free rows and memory

    def _wake_consumers(self) -> None:
        wake(self._touched)
        self._touched.clear()

    def _admit(self) -> None:
        """Prefill who waits and is ready, first come first served, while rows and memory are free."""
        for late in self._waiting.take_all(lambda request: self._expired(request) is not None):
            self._end_rows(late, range(len(late.generation.rows)))
        while not self._is_failing:
            request = self._waiting.next_ready()
            if request is None:
                return
            running = {key: (len(group.rows), group.most_slots) for key, group in self._groups.items()}
            if not self.admission.fits(request.generation, _key(request.generation), running):
                return
            if not self._waiting.take(request):
                continue
            try:
                self._start(request)
            except Exception as error:  # one request's fault, or its memory: the others go on
                self._finish(request, error)

    def _start(self, request: Request) -> None:
        generation = request.generation
        key, length = _key(generation), generation.most_slots
        for other, group in self._groups.items():
            if other != key:
                group.state.cache.trim()  # the memory of rows that left is what the newcomer is let in for
        generation.cache_in = held = self.prefixes.find(request.prompt)
        request.cached_tokens = len(held.token_ids) if held else 0
        encoding, request.encoding = request.encoding, None
        features = []
        if encoding is not None:
            features = encoding.features.result()[(len(held.image_digests) if held else 0) - encoding.first :]
        if not self._groups:
            self._lean = lean_forward(self.model.encoder)
        state = generation.begin(features, self._lean)
        self.totals.forwards += 1
        self.totals.prefill_forwards += 1
        first, self._next_row = self._next_row, self._next_row + state.batch
        state.rows = [first + i for i in state.rows]
        rows = {first + i: (request, i) for i in range(state.batch)}
        if key not in self._groups:
            state.faults = {}
            self._groups[key] = _Group(state, DECODERS[request.mode](state), rows, length)
        else:
            group = self._groups[key]
            group.state.joining.append(state)
            group.rows |= rows
            group.most_slots = max(group.most_slots, length)

    def _step(self, key: Hashable, group: _Group) -> None:
        """One round of a group: what it brought goes to the requests."""
        forwards = group.state.num_forwards
        try:
            for number, (request, i) in list(group.rows.items()):
                if self._expired(request) is not None and number in group.state.rows:
                    self._remember(group, number, request.generation.rows[i])
                    self._leave(group, number)
                    self._end_rows(request, [i])
            steps = next(group.decoder, None)
            if steps is None:
                del self._groups[key]
                return
            for number, error in (group.state.faults or {}).items():
                self._fail(group, number, error)
            for step in steps:
                try:
                    self._take(group, step)
                except Exception as error:  # a user's stopping criterion
                    self._fail(group, step.row, error)
            group.state.faults = {}
        except Exception as error:  # a fault of the batch, such as memory: its requests end, the engine goes on
            del self._groups[key]
            for request in {id(r): r for r, _ in group.rows.values()}.values():
                self._finish(request, error)
        self.totals.steps += 1
        self.totals.forwards += group.state.num_forwards - forwards

    def _take(self, group: _Group, step: Step) -> None:
        if step.row not in group.rows:
            return  # it was to end before its first step
        request, i = group.rows[step.row]
        row = request.generation.rows[i]
        event = request.generation.take(row, step, i)
        self.totals.tokens += len(event.token_ids)
        group.state.remaining[group.state.rows.index(step.row)] = row.remaining
        if event.token_ids or event.canvas or event.finish_reason:
            request.put(event)
            self._touched.add(request)
        if row.finish_reason:
            self._remember(group, step.row, row)
            self._leave(group, step.row)
            self._finish_if_done(request)

    def _fail(self, group: _Group, number: int, error: Exception) -> None:
        """End the request of a row, and no other."""
        if number not in group.rows:
            return
        request, _ = group.rows[number]
        for own in [own for own, (other, _) in group.rows.items() if other is request]:
            self._leave(group, own)
        self._finish(request, error)

    def _leave(self, group: _Group, number: int) -> None:
        group.state.finished.add(number)
        del group.rows[number]

    def _remember(self, group: _Group, number: int, row: Row) -> None:
        """Keep a row's keys for whoever continues the conversation."""
        index = group.state.rows.index(number)
        known = row.prompt.token_ids + row.token_ids
        length = min(group.state.cache.lengths[index], len(known))
        if self._is_failing or not self.prefixes.takes(length, length * self.admission.bytes_per_slot):
            return
        kv = group.state.cache.select([index], length)
        self.prefixes.put(ConversationCache(kv, known[:length], row.prompt.digests))

    def _end_rows(self, request: Request, indices: Iterable[int]) -> None:
        """Close rows that were cancelled or ran out of time, with what they have."""
        for i in indices:
            row = request.generation.rows[i]
            row.finish_reason = self._expired(request)
            row.seconds = time.perf_counter() - request.generation.start
            request.put(
                StreamEvent(
                    row=i, token_ids=[], num_forwards=row.nfe, seconds=row.seconds, finish_reason=row.finish_reason
                )
            )
        self._touched.add(request)
        self._finish_if_done(request)

    def _finish_if_done(self, request: Request) -> None:
        if all(row.finish_reason for row in request.generation.rows):
            was_cut = self._is_failing and any(row.finish_reason == "cancelled" for row in request.generation.rows)
            self._finish(request, RequestError(str(self._waiting.closed)) if was_cut else None)

    def _finish(self, request: Request, error: BaseException | None) -> None:
        reason = "error" if error is not None else str(request.generation.rows[0].finish_reason)
        self.totals.finished[reason] += 1
        if error is not None and not self.is_closing:
            logger.error("a request failed", exc_info=error)
        request.finish(error)
        self._touched.add(request)
        if self.on_finish is not None:
            try:
                self.on_finish(request)
            except Exception:  # the caller's own fault, which must not stop the engine
                logger.exception("on_finish failed")

    def _expired(self, request: Request) -> str | None:
        """Why a request must end now, or None."""
        if request.is_cancelled or self._is_failing:
            return "cancelled"
        if request.deadline is not None and time.perf_counter() > request.deadline:
            return "timeout"
        return None


def _key(generation: Generation) -> Hashable:
    """What rows must share to decode as one batch."""
    config = generation.config
    settings = config.settings(generation.model.config.block_length)
    return config.mode, settings, config.end_token_ids
