"""The engine: an answer is that of the request alone, whatever runs beside it; cancelling, limits, caches, memory."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MODES, options, prompts
from serving import wait_for
from transformers import RepetitionPenaltyLogitsProcessor

from trimode_vlm.cache import KVCache
from trimode_vlm.engine import Engine, EngineSettings
from trimode_vlm.request import QueueFullError, RequestError
from trimode_vlm.serving_caches import FeatureCache

ENDS = [END, 17, 30, 41]


class Words:
    """A processor whose tokenizer writes id 20 as " 20"."""

    added_tokens_decoder: dict[int, Any] = {}

    def __init__(self) -> None:
        self.tokenizer = self

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f" {i}" for i in ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f" {token_id}"


def inputs_of(ids: list[int], **images: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([ids]), **images}


class Gate:
    """Holds the engine at a backbone call until the test lets it go on; `reached` once a call is held.

    Args:
        pace_sec: waits so long before each call, so that 900 tokens last until the test has closed the gate.
    """

    def __init__(self, model: Any, pace_sec: float = 0.0) -> None:
        self.open, self.reached, self.calls = threading.Event(), threading.Event(), 0
        self.pace_sec, self._lock = pace_sec, threading.Lock()
        self.open.set()
        hidden = model.hidden

        def gated(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.pace_sec)
            with self._lock:
                self.calls += 1
                if not self.open.is_set():
                    self.reached.set()
            assert self.open.wait(60)
            return hidden(*args, **kwargs)

        model.hidden = gated

    def close(self) -> None:
        with self._lock:
            self.open.clear()
            self.reached.clear()


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_that_of_the_request_alone(mode: str, sampling: dict[str, Any]) -> None:
    """Requests come in at random moments, so that rows join at every border and leave at others."""
    model = make_tiny_model(seed=7, vision=False)
    chosen = {"max_new_tokens": 15, "eos_token_id": ENDS, **options(mode, 4, 0.3), **sampling}
    asked = prompts(16, seed=3)
    alone = [model.generate(torch.tensor([ids]), seed=i, **chosen) for i, ids in enumerate(asked)]
    pause = random.Random(0)
    with Engine(model, Words(), EngineSettings(max_rows=5)) as engine:
        requests = []
        for i, ids in enumerate(asked):
            requests.append(engine.submit(inputs_of(ids), seed=i, **chosen))
            time.sleep(pause.choice([0, 0, 0.002, 0.01]))
        for request, expected in zip(requests, alone, strict=True):
            out = request.result()
            assert out.sequences.tolist() == expected.sequences.tolist()
            assert out.finish_reasons == expected.finish_reasons
            assert (out.nfe, out.accepted_lengths) == (expected.nfe, expected.accepted_lengths)
    reasons = Counter(str(expected.finish_reasons[0]) for expected in alone)
    assert engine.stats()["finished"] == reasons and set(reasons) <= {"stop", "length"}


def test_rows_do_decode_together() -> None:
    model = make_tiny_model(seed=1, vision=False)
    gate = Gate(model)
    gate.close()
    with Engine(model, Words()) as engine:
        requests = [engine.submit(inputs_of(ids), max_new_tokens=20, eos_token_id=[]) for ids in prompts(6, seed=1)]
        gate.open.set()
        for request in requests:
            request.result()
    # Six prefills, then 19 tokens each: the first may have taken a step before the others had come in.
    assert 6 + 19 <= gate.calls <= 6 + 19 + 6


@pytest.mark.parametrize("mode", MODES)
def test_text_and_events_are_the_answers(mode: str) -> None:
    model = make_tiny_model(seed=2, vision=False)
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20, 21, 22]), max_new_tokens=12, eos_token_id=[], **options(mode, 4))
        events = list(request)
    tokens = request.output().sequences[0, 3:].tolist()
    assert [t for e in events for t in e.event.token_ids] == tokens
    assert "".join(e.text for e in events) == request.texts[0] == Words().decode(tokens)
    assert [e.event.finish_reason for e in events if e.event.finish_reason] == ["length"]


def test_a_stop_string_ends_the_text_before_it() -> None:
    model = make_tiny_model(seed=2, vision=False)
    tokens = model.generate(torch.tensor([[20, 21]]), max_new_tokens=9, eos_token_id=[]).sequences[0, 2:].tolist()
    stop = f" {tokens[3]} {tokens[4]}"
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20, 21]), max_new_tokens=9, eos_token_id=[], stop_strings=[stop])
        assert request.result().finish_reasons == ["stop"]
    assert request.texts == [Words().decode(tokens)[: Words().decode(tokens).index(stop)]]


@pytest.mark.parametrize("mode", MODES)
def test_cancelling_ends_the_forwards_within_one_step(mode: str) -> None:
    model = make_tiny_model(seed=3, vision=False)
    gate = Gate(model, pace_sec=0.02)
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20, 21]), max_new_tokens=900, eos_token_id=[], **options(mode, 4))
        next(event for event in request if event.event.token_ids)
        gate.close()
        assert gate.reached.wait(60)
        request.cancel()
        calls = gate.calls
        gate.open.set()
        out = request.result()
        # Self-speculation may be between the draft and its check: both belong to the step.
        assert gate.calls - calls <= (1 if mode == "linear_spec" else 0)
        assert out.finish_reasons == ["cancelled"] and 0 < out.num_new_tokens[0] < 900
        again = engine.submit(inputs_of([20, 21]), max_new_tokens=5, eos_token_id=[], **options(mode, 4))
        assert again.result().num_new_tokens == [5]
    assert engine.stats()["running"] == 0


def test_cancelling_one_row_leaves_the_others_as_they_are() -> None:
    model = make_tiny_model(seed=3, vision=False)
    asked = prompts(4, seed=5)
    expected = [model.generate(torch.tensor([ids]), max_new_tokens=40, eos_token_id=[]) for ids in asked]
    gate = Gate(model, pace_sec=0.02)
    with Engine(model, Words()) as engine:
        requests = [
            engine.submit(inputs_of(ids), max_new_tokens=budget, eos_token_id=[])
            for ids, budget in zip(asked, (40, 900), strict=False)
        ]
        next(iter(requests[1]))
        gate.close()
        requests += [engine.submit(inputs_of(ids), max_new_tokens=40, eos_token_id=[]) for ids in asked[2:]]
        requests[1].cancel()
        requests[3].cancel()  # before its first step
        gate.pace_sec = 0.0
        gate.open.set()
        for i in (0, 2):
            assert requests[i].result().sequences.tolist() == expected[i].sequences.tolist()
        assert requests[1].result().finish_reasons == requests[3].result().finish_reasons == ["cancelled"]


def test_a_waiting_request_can_be_cancelled_and_can_run_out_of_time() -> None:
    model = make_tiny_model(seed=3, vision=False)
    gate = Gate(model)
    with Engine(model, Words(), EngineSettings(max_rows=1)) as engine:
        gate.close()
        first = engine.submit(inputs_of([20]), max_new_tokens=3, eos_token_id=[])
        assert gate.reached.wait(60)
        waiting = engine.submit(inputs_of([21]), max_new_tokens=3, eos_token_id=[])
        late = engine.submit(inputs_of([22]), max_new_tokens=3, eos_token_id=[], timeout_sec=0.0)
        waiting.cancel()
        gate.open.set()
        assert first.result().finish_reasons == ["length"]
        assert waiting.result().finish_reasons == ["cancelled"] and waiting.output().nfe == [0]
        assert late.result().finish_reasons == ["timeout"] and late.output().num_new_tokens == [0]


def test_a_running_request_that_runs_out_of_time_keeps_what_it_has() -> None:
    model = make_tiny_model(seed=3, vision=False)
    gate = Gate(model, pace_sec=0.02)
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20]), max_new_tokens=900, eos_token_id=[], timeout_sec=600)
        next(iter(request))
        gate.close()
        request.deadline = time.perf_counter()
        gate.open.set()
        out = request.result()
    assert out.finish_reasons == ["timeout"] and 0 < out.num_new_tokens[0] < 900


def test_the_queue_has_a_limit() -> None:
    model = make_tiny_model(vision=False)
    gate = Gate(model)
    gate.close()
    with Engine(model, Words(), EngineSettings(max_rows=1, queue_limit=2)) as engine:
        running = engine.submit(inputs_of([20]), max_new_tokens=2, eos_token_id=[])
        assert gate.reached.wait(60)
        waiting = [engine.submit(inputs_of([20]), max_new_tokens=2, eos_token_id=[]) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait"):
            engine.submit(inputs_of([20]), max_new_tokens=2, eos_token_id=[])
        gate.open.set()
        assert [r.result().num_new_tokens for r in (running, *waiting)] == [[2]] * 3


def test_memory_bounds_what_runs_together() -> None:
    model = make_tiny_model(vision=False)
    per_slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, kv heads, head width, bytes
    settings = EngineSettings(kv_bytes=2 * 31 * per_slot)
    seen: list[int] = []
    gate = Gate(model)
    gate.close()
    hidden = model.hidden
    model.hidden = lambda embeds, *args: (seen.append(len(embeds)), hidden(embeds, *args))[1]
    with Engine(model, Words(), settings) as engine:
        requests = [engine.submit(inputs_of([20] * 10), max_new_tokens=20, eos_token_id=[]) for _ in range(5)]
        gate.open.set()
        for request in requests:
            request.result()
        with pytest.raises(ValueError, match=r"80 tokens with 20 new ones needs .* lower max_new_tokens"):
            engine.submit(inputs_of([20] * 80), max_new_tokens=20, eos_token_id=[])
    assert max(seen) == 2


def test_a_request_that_waits_ends_in_time_behind_one_that_does_not_fit() -> None:
    model = make_tiny_model(vision=False)
    gate = Gate(model, pace_sec=0.02)
    with Engine(model, Words(), EngineSettings(max_rows=2)) as engine:
        gate.close()
        running = engine.submit(inputs_of([20]), max_new_tokens=900, eos_token_id=[])
        assert gate.reached.wait(60)
        two_rows = {"num_return_sequences": 2, "do_sample": True}
        head = engine.submit(inputs_of([20]), max_new_tokens=3, eos_token_id=[], **two_rows)
        late = engine.submit(inputs_of([21]), max_new_tokens=3, eos_token_id=[], timeout_sec=0.0)
        left = engine.submit(inputs_of([22]), max_new_tokens=3, eos_token_id=[])
        left.cancel()
        gate.open.set()
        assert late.result().finish_reasons == ["timeout"] and left.result().finish_reasons == ["cancelled"]
        assert not running.is_done and not head.is_done
        running.cancel()
        assert head.result().num_new_tokens == [3, 3]


def test_what_generate_refuses_is_refused_at_once() -> None:
    model = make_tiny_model(vision=False)
    with Engine(model, Words()) as engine:
        for bad in ({"mode": "fast"}, {"max_new_tokens": 0}, {"treshold": 0.5}, {"mode": "ar", "block_length": 4}):
            with pytest.raises(ValueError):
                engine.submit(inputs_of([20]), **bad)
        with pytest.raises(ValueError, match="2 rows"):
            engine.submit({"input_ids": torch.tensor([[20], [21]])})
        assert engine.submit(inputs_of([20]), max_new_tokens=1).result().num_new_tokens == [1]


def test_a_fault_ends_its_batch_and_not_the_engine() -> None:
    model = make_tiny_model(vision=False)
    hidden = model.hidden
    with Engine(model, Words()) as engine:
        model.hidden = lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room"))
        request = engine.submit(inputs_of([20]), max_new_tokens=4)
        with pytest.raises(RequestError, match="no room"):
            request.result()
        model.hidden = hidden
        assert engine.submit(inputs_of([20]), max_new_tokens=4, eos_token_id=[]).result().num_new_tokens == [4]
    assert engine.stats()["finished"] == {"error": 1, "length": 1}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "diffusion"])
@pytest.mark.parametrize("fault", ["processor", "criterion", "penalty"])
def test_what_one_request_asks_for_harms_no_other(mode: str, fault: str) -> None:
    model = make_tiny_model(seed=6, vision=False)
    chosen = {"max_new_tokens": 30, "eos_token_id": [], "do_sample": True, **options(mode, 4)}
    asked = prompts(4, seed=2)
    alone = [model.generate(torch.tensor([ids]), seed=i, **chosen) for i, ids in enumerate(asked)]

    def late(ids: torch.Tensor, value: Any) -> Any:
        return 1 / (15 - ids.shape[1]) * value if value is not None else 1 / (15 - ids.shape[1]) > 2

    odd = {
        "processor": {"logits_processor": [late]},
        "criterion": {"stopping_criteria": [late]},
        "penalty": {"repetition_penalty": 1e-45},
    }[fault]
    gate = Gate(model)
    gate.close()
    with Engine(model, Words()) as engine:
        requests = [engine.submit(inputs_of(ids), seed=i, **chosen) for i, ids in enumerate(asked)]
        strange = engine.submit(inputs_of([20, 21, 22]), seed=9, **chosen, **odd)
        gate.open.set()
        for request, expected in zip(requests, alone, strict=True):
            assert request.result().sequences.tolist() == expected.sequences.tolist()
        if fault == "penalty":
            assert strange.result().num_new_tokens == [30]
        else:
            with pytest.raises(RequestError, match="division by zero"):
                strange.result()


def test_a_fault_of_the_engine_itself_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(vision=False)
    gate = Gate(model)
    gate.close()
    engine = Engine(model, Words(), EngineSettings(max_rows=1))
    requests = [engine.submit(inputs_of([20]), max_new_tokens=4, eos_token_id=[]) for _ in range(2)]
    assert gate.reached.wait(60)
    monkeypatch.setattr(engine, "_step", lambda *_: 1 / 0)
    gate.open.set()
    for request in requests:
        with pytest.raises(RequestError, match="division by zero"):
            request.result()
    with pytest.raises(RequestError, match="the engine has failed: ZeroDivisionError"):
        engine.submit(inputs_of([20]))
    engine.close()
    assert not engine.is_alive


def test_memory_that_a_cancelled_row_lacks_ends_its_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(vision=False)
    Gate(model, pace_sec=0.02)
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20] * 20), max_new_tokens=900, eos_token_id=[])
        next(iter(request))
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "select", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            request.cancel()
            with pytest.raises(RequestError, match="no room"):
                request.result()
        assert engine.submit(inputs_of([20]), max_new_tokens=4, eos_token_id=[]).result().num_new_tokens == [4]


def test_a_listener_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(make_tiny_model(vision=False), Words(), on_finish=lambda _: 1 / 0) as engine:
        for _ in range(2):
            assert engine.submit(inputs_of([20]), max_new_tokens=4, eos_token_id=[]).result().num_new_tokens == [4]
    assert caplog.text.count("on_finish failed") == 2


def test_a_mode_that_needs_a_mask_is_refused_at_once() -> None:
    model = make_tiny_model(vision=False)
    model.config.mask_token_id = None
    with Engine(model, Words()) as engine:
        with pytest.raises(ValueError, match="needs a mask token"):
            engine.submit(inputs_of([20]), mode="diffusion")
        assert engine.submit(inputs_of([20]), max_new_tokens=2).result().total_nfe is None


def open_when_closing(engine: Engine, gate: Gate) -> None:
    wait_for(lambda: engine.is_closing)
    gate.open.set()


def test_closing_fails_what_runs_and_draining_answers_it() -> None:
    for drain in (True, False):
        model = make_tiny_model(vision=False)
        gate = Gate(model)
        engine = Engine(model, Words())
        gate.close()
        requests = [engine.submit(inputs_of(ids), max_new_tokens=60, eos_token_id=[]) for ids in prompts(3, seed=0)]
        assert gate.reached.wait(60)
        threading.Thread(target=open_when_closing, args=(engine, gate)).start()
        engine.close(drain=drain)
        for request in requests:
            if drain:
                assert request.result().num_new_tokens == [60]
            else:
                with pytest.raises(RequestError, match="shutting down"):
                    request.result()
        with pytest.raises(RequestError, match="shutting down"):
            engine.submit(inputs_of([20]))


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_that_goes_on_is_not_computed_again(mode: str) -> None:
    model = make_tiny_model(seed=4, vision=False)
    chosen = {"max_new_tokens": 10, "eos_token_id": [], **options(mode, 4)}
    first = list(range(20, 50))
    with Engine(model, Words()) as engine:
        one = engine.submit(inputs_of(first), **chosen).result()
        second = [*one.sequences[0].tolist(), 9, 8, 9]
        lengths: list[int] = []
        hidden = model.hidden
        model.hidden = lambda embeds, *args: (lengths.append(embeds.shape[1]), hidden(embeds, *args))[1]
        request = engine.submit(inputs_of(second), **chosen)
        two = request.result()
        stats = engine.stats()
    assert two.sequences.tolist() == model.generate(torch.tensor([second]), **chosen).sequences.tolist()
    assert request.cached_tokens == stats["prefix_hit_tokens"] == len(second) - lengths[0]
    assert lengths[0] <= 3 + 4  # the new tokens, and what of the last block was drafted only


def test_the_same_picture_is_encoded_once(tiny_model: Any) -> None:
    pixels = torch.randn(1, 3, 56, 56)
    images = {"pixel_values": pixels, "image_sizes": torch.tensor([[56, 56]])}
    span = [5, 4, 4, 6, 4, 4, 7]
    calls = []
    encode = tiny_model.encode_images
    tiny_model.encode_images = lambda *args: calls.append(1) or encode(*args)
    try:
        with Engine(tiny_model, Words()) as engine:
            outs = [
                engine.submit(inputs_of([word, *span, 30], **images), max_new_tokens=6, eos_token_id=[]).result()
                for word in (20, 21, 20)
            ]
            other = inputs_of(
                [20, *span, 30], pixel_values=torch.randn(1, 3, 56, 56), image_sizes=images["image_sizes"]
            )
            engine.submit(other, max_new_tokens=6, eos_token_id=[]).result()
    finally:
        del tiny_model.encode_images
    assert len(calls) == 2
    for word, out in zip((20, 21, 20), outs, strict=True):
        alone = tiny_model.generate(torch.tensor([[word, *span, 30]]), **images, max_new_tokens=6, eos_token_id=[])
        assert out.sequences.tolist() == alone.sequences.tolist()


def test_a_feature_cache_keeps_to_its_bytes() -> None:
    cache = FeatureCache(limit_bytes=40)
    for name in "abc":
        cache.put(name, torch.ones(4))
        assert cache.held_bytes <= 40
    assert cache.get("a") is None and cache.get("c") is not None
    cache.put("large", torch.ones(100))
    assert cache.get("large") is None and cache.held_bytes == 32


def test_each_request_has_its_own_logits_processors() -> None:
    model = make_tiny_model(seed=6, vision=False)
    penalties = [None, 1.3, 5.0]
    processors = [[] if p is None else [RepetitionPenaltyLogitsProcessor(p)] for p in penalties]
    chosen = {"max_new_tokens": 14, "eos_token_id": [], "mode": "linear_spec", "block_length": 4}
    expected = [model.generate(torch.tensor([[20, 21]]), logits_processor=p, **chosen) for p in processors]
    assert len({str(out.sequences.tolist()) for out in expected}) == 3
    with Engine(model, Words()) as engine:
        requests = [engine.submit(inputs_of([20, 21]), logits_processor=p, **chosen) for p in processors]
        outs = [request.result() for request in requests]
    assert [o.sequences.tolist() for o in outs] == [e.sequences.tolist() for e in expected]


def test_requests_of_all_modes_run_beside_each_other() -> None:
    model = make_tiny_model(seed=8, vision=False)
    asked = [(mode, ids) for ids in prompts(3, seed=8) for mode in MODES]
    chosen = [{"max_new_tokens": 12, "eos_token_id": ENDS, **options(mode, 4)} for mode, _ in asked]
    expected = [model.generate(torch.tensor([ids]), **c) for (_, ids), c in zip(asked, chosen, strict=True)]
    with Engine(model, Words()) as engine:
        requests = [engine.submit(inputs_of(ids), **c) for (_, ids), c in zip(asked, chosen, strict=True)]
        for request, out in zip(requests, expected, strict=True):
            assert request.result().sequences.tolist() == out.sequences.tolist()


def test_an_asyncio_consumer_that_goes_away_cancels() -> None:
    model = make_tiny_model(seed=8, vision=False)

    async def read_two(request: Any) -> int:
        count = 0
        events = request.events()
        async for _ in events:
            count += 1
            if count == 2:
                break
        await events.aclose()
        return count

    Gate(model, pace_sec=0.02)
    with Engine(model, Words()) as engine:
        request = engine.submit(inputs_of([20]), max_new_tokens=1000, eos_token_id=[])
        assert asyncio.run(read_two(request)) == 2
        request.result()
    assert engine.stats()["finished"] == {"cancelled": 1}
