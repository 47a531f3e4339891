"""The engine's memory: rows that come and go, requests that are cancelled or fail, and caches that keep to their bytes.

Counted are tensors and their bytes, which say more than the process's resident memory.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import MODES, options, prompts
from serving import wait_for
from test_engine import Gate, Words, inputs_of

from trimode_vlm import prefill, serving_caches
from trimode_vlm.cache import KVCache
from trimode_vlm.conversation import ConversationCache
from trimode_vlm.engine import Engine, EngineSettings
from trimode_vlm.prefill import Prompt
from trimode_vlm.request import Request, RequestError
from trimode_vlm.serving_caches import PrefixCache


def live_tensors(engine: Engine) -> tuple[int, int]:
    """How many tensors there are, and their bytes; not the prefix cache's, where chance decides which ones stay."""
    gc.collect()
    cached = {id(t) for entry in engine.prefixes._entries for t in (entry.kv.kv, *entry.kv._layers)}
    found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and id(o) not in cached]
    return len(found), sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def wait_until_idle(engine: Engine, requests: Sequence[Request]) -> None:
    """Until all have ended and their batches are gone: stats() counts neither a prompt that is being read nor those."""
    wait_for(lambda: all(request.is_done for request in requests) and not engine._groups)


def churn(engine: Engine, model: Any, count: int, seed: int) -> None:
    """Requests of all modes that end by themselves, are cancelled, run out of time, or meet a fault."""
    chance = random.Random(seed)
    hidden = model.hidden
    requests: list[Request] = []
    for ids in prompts(count, seed=5):  # the same prompts in every wave, so that the caches are full after the first
        chosen = {"max_new_tokens": chance.choice([3, 8, 14]), "eos_token_id": [], "seed": 1}
        chosen |= options(chance.choice(MODES), 4)
        timeout_sec = 0.0 if chance.random() < 0.1 else None
        request = engine.submit(inputs_of(ids), timeout_sec=timeout_sec, **chosen)
        requests.append(request)
        fate = chance.random()
        if fate < 0.2:
            request.cancel()
        elif fate < 0.4:
            next(iter(request), None)
            request.cancel()
        elif fate < 0.45:
            wait_until_idle(engine, requests)
            model.hidden = lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room"))
            broken = engine.submit(inputs_of([*ids, 20]), **chosen)
            with pytest.raises(RequestError):
                broken.result()
            model.hidden = hidden
    wait_until_idle(engine, requests)


def test_memory_is_flat_under_requests_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps what is logged, faults and all that they hold.
    monkeypatch.setattr("trimode_vlm.engine.logger.disabled", True)
    model = make_tiny_model(seed=4, vision=False)
    settings = EngineSettings(max_rows=4, prefix_cache_bytes=60_000)
    with Engine(model, Words(), settings) as engine:
        for seed in range(2):
            churn(engine, model, 60, seed)
        count, size = live_tensors(engine)
        for seed in range(2, 5):
            churn(engine, model, 60, seed)
        after, bytes_after = live_tensors(engine)
        assert set(engine.stats()["finished"]) == {"length", "cancelled", "timeout", "error"}
        assert engine.stats()["kv_bytes"] == 0 and not engine._groups
        assert engine.prefixes.held_bytes <= 60_000
    # The engine's thread still holds its last batch; a row left behind in each wave would be more.
    assert after <= count + 12 and bytes_after <= size + 60_000


def test_what_ended_is_forgotten_with_its_last_holder() -> None:
    model = make_tiny_model(seed=4, vision=False)
    with Engine(model, Words(), EngineSettings(prefix_cache_bytes=0)) as engine:
        kept: list[weakref.ref[Request]] = []
        for mode in MODES:
            request = engine.submit(inputs_of([20, 21]), max_new_tokens=5, eos_token_id=[], **options(mode, 4))
            request.result()
            kept.append(weakref.ref(request))
        request = engine.submit(inputs_of([20, 21]), max_new_tokens=900, eos_token_id=[])
        next(iter(request))
        request.cancel()
        request.result()
        kept.append(weakref.ref(request))
        del request
        for _ in range(400):
            gc.collect()
            if not any(ref() for ref in kept):
                return
            time.sleep(0.005)
    raise AssertionError([ref() for ref in kept])


def filled(config: Any, lengths: list[int], capacity: int) -> KVCache:
    cache = KVCache(config, len(lengths), capacity, torch.float32)
    cache.kv.normal_(generator=torch.Generator().manual_seed(sum(lengths)))
    cache.set_lengths(lengths)
    return cache


def rows_of(cache: KVCache) -> list[torch.Tensor]:
    """What each row holds: [layers, 2 G, length, K]."""
    return [cache.kv[:, i, :, :length].clone() for i, length in enumerate(cache.lengths)]


def test_rows_that_leave_and_come_are_as_in_a_list_of_rows() -> None:
    config = make_tiny_model(vision=False).config
    chance = random.Random(1)
    cache = filled(config, [4, 2, 7], 9)
    expected = rows_of(cache)
    most = cache.nbytes
    for _ in range(60):
        if cache.batch > 1 and chance.random() < 0.5:
            kept = sorted(chance.sample(range(cache.batch), chance.randint(1, cache.batch - 1)))
            cache.keep(kept)
            expected = [expected[i] for i in kept]
        elif cache.batch < 6:
            new = filled(config, [chance.randint(1, 9) for _ in range(chance.randint(1, 2))], 12)
            cache.join(new)
            expected += rows_of(new)
        most = max(most, cache.nbytes)
        assert all(map(torch.equal, rows_of(cache), expected)) and len(expected) == cache.batch
        assert cache.kv.isfinite().all()
    per_row = filled(config, [1], 9).nbytes
    assert most <= 7 * per_row
    cache.trim()
    assert cache.nbytes == cache.batch * per_row and all(map(torch.equal, rows_of(cache), expected))


def test_a_newcomer_takes_the_place_of_a_row_that_left() -> None:
    config = make_tiny_model(vision=False).config
    cache = filled(config, [4, 2, 7], 9)
    buffer = cache._buffer
    cache.keep([0, 2])
    cache.join(filled(config, [5], 20))
    assert cache._buffer is buffer and cache.lengths == [4, 7, 5]


def test_rows_that_left_give_their_memory_to_a_batch_of_another_kind() -> None:
    """Three rows of AR leave one behind; what the limit has for two more rows is then for another mode."""
    model = make_tiny_model(seed=3, vision=False)
    per_slot = 2 * 2 * 2 * 8 * 4
    seen: list[int] = []
    limit = 3 * 250 * per_slot
    hidden = model.hidden
    with Engine(model, Words(), EngineSettings(kv_bytes=limit)) as engine:
        model.hidden = lambda *args: (seen.append(engine.stats()["kv_bytes"]), hidden(*args))[1]
        long = engine.submit(inputs_of([20] * 10), max_new_tokens=230, eos_token_id=[])
        short = [engine.submit(inputs_of([21] * 10), max_new_tokens=2, eos_token_id=[]) for _ in range(2)]
        for request in short:
            request.result()
        other = [
            engine.submit(inputs_of([22] * 10), max_new_tokens=200, eos_token_id=[], mode="linear_spec", block_length=4)
            for _ in range(2)
        ]
        for request in (long, *other):
            assert request.result().finish_reasons == ["length"]
    assert 0 < max(seen) <= limit


@pytest.mark.parametrize("mode", MODES)
def test_the_limit_holds_for_all_buffers_that_are_alive(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing by half, and what a joined row came with, are no memory beside the limit."""
    monkeypatch.setattr(prefill, "FIRST_ROOM", 16)
    model = make_tiny_model(seed=3, vision=False)
    per_slot = 2 * 2 * 2 * 8 * 4
    chosen = {"max_new_tokens": 100, "eos_token_id": [], "mode": mode, **options(mode, 4)}
    slots = 10 + 100 + {"ar": 1, "quadratic_spec": 20}.get(mode, 4)
    seen: list[int] = []
    alive: weakref.WeakSet[KVCache] = weakref.WeakSet()
    gate = Gate(model)
    gate.close()
    set_buffer, hidden = KVCache._set_buffer, model.hidden

    def noted(cache: KVCache, *args: Any) -> None:
        alive.add(cache)
        set_buffer(cache, *args)

    def watched(embeds: torch.Tensor, *args: Any) -> torch.Tensor:
        if embeds.shape[:2] != (1, 10):  # while nobody joins: then rows are on their way from one buffer to another
            seen.append(sum(cache._buffer.nbytes for cache in alive))
        return hidden(embeds, *args)

    monkeypatch.setattr(KVCache, "_set_buffer", noted)

    with Engine(model, Words(), EngineSettings(kv_bytes=3 * slots * per_slot, prefix_cache_bytes=0)) as engine:
        model.hidden = watched
        requests = [engine.submit(inputs_of([20 + i] * 10), **chosen) for i in range(3)]
        gate.open.set()
        for request in requests:
            request.result()
    assert per_slot * slots < max(seen) <= 3 * slots * per_slot


def test_a_prefix_cache_keeps_few_enough_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_caches, "MAX_CONVERSATIONS", 3)
    config = make_tiny_model(vision=False).config
    cache = PrefixCache(10**9, None)
    for first in range(5):
        cache.put(ConversationCache(filled(config, [20], 20), [first] * 20))
    assert [cache.find(Prompt([first] * 20)) is None for first in range(5)] == [True, True, False, False, False]


def test_a_prefix_cache_keeps_to_its_bytes_and_drops_the_least_used() -> None:
    config = make_tiny_model(vision=False).config

    def conversation(word: int) -> ConversationCache:
        return ConversationCache(filled(config, [20], 20), [word] * 20, [])

    size = conversation(1).kv.nbytes
    cache = PrefixCache(2 * size + 10, None)
    for word in (1, 2):
        cache.put(conversation(word))
    assert cache.find(Prompt([1] * 30)) is not None  # used: 2 is now the older
    cache.put(conversation(3))
    assert cache.held_bytes == 2 * size
    assert [cache.find(Prompt([w] * 30)) is not None for w in (1, 2, 3)] == [True, False, True]
    cache.put(ConversationCache(filled(config, [60], 60), [4] * 60, []))
    assert cache.held_bytes == 2 * size and cache.find(Prompt([4] * 60)) is None
    # What continues a conversation takes its place.
    cache.put(ConversationCache(filled(config, [25], 25), [1] * 20 + [9] * 5, []))
    assert cache.held_bytes <= 2 * size + 10 and sum(e.token_ids[0] == 1 for e in cache._entries) == 1


def test_an_idle_engine_holds_no_rows() -> None:
    def caches() -> int:
        gc.collect()
        return sum(type(thing) is KVCache for thing in gc.get_objects())

    before = caches()
    with Engine(make_tiny_model(vision=False), Words(), EngineSettings(prefix_cache_bytes=0)) as engine:
        engine.submit(inputs_of([20, 21]), max_new_tokens=4, eos_token_id=[]).result()
        wait_for(lambda: caches() == before, 10)
