"""An engine's images: encoded by a thread of their own while others decode, and no answer differs for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serving import wait_for
from test_engine import Gate, Words, inputs_of

from trimode_vlm.engine import Engine, EngineSettings
from trimode_vlm.request import RequestError
from trimode_vlm.waiting import AHEAD

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": []}
SPAN = [5, 4, 4, 6, 4, 4, 7]


def picture(word: int, seed: int, count: int = 1) -> dict[str, Any]:
    """A prompt with `count` images of its own."""
    pixels = torch.randn(count, 3, 56, 56, generator=torch.Generator().manual_seed(seed))
    return inputs_of([word, *SPAN * count, 30], pixel_values=pixels, image_sizes=torch.tensor([[56, 56]] * count))


class Tower:
    """Watches a model's tower, and holds each call until `open` is set; `reached` once one is held."""

    def __init__(self, model: Any) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()
        self.threads: list[str] = []
        self.counts: list[int] = []
        encode = model.encode_images

        def watched(pixels: Any, *args: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            self.counts.append(len(pixels))
            self.reached.set()
            assert torch.is_inference_mode_enabled() and self.open.wait(60)
            return encode(pixels, *args)

        model.encode_images = watched


@pytest.fixture
def model(tiny_model: Any) -> Iterator[Any]:
    yield tiny_model
    for name in ("encode_images", "hidden"):
        vars(tiny_model).pop(name, None)


def test_each_part_of_the_model_has_one_thread(model: Any) -> None:
    tower, backbone = Tower(model), []
    hidden = model.hidden
    model.hidden = lambda *args: (backbone.append(threading.current_thread().name), hidden(*args))[1]
    asked = [picture(20 + i, i) for i in range(5)] + [inputs_of([20, 21, 22])]
    with Engine(model, Words(), EngineSettings(feature_cache_bytes=0, prefix_cache_bytes=0)) as engine:
        requests = [engine.submit(inputs, **OPTIONS) for inputs in asked]
        outs = [request.result() for request in requests]
        assert all(request.encoding is None for request in requests)  # its features are not held any longer
    threads = set(tower.threads), set(backbone)
    for inputs, out in zip(asked, outs, strict=True):
        assert out.sequences.tolist() == model.generate(**inputs, **OPTIONS).sequences.tolist()
    assert len(threads[0]) == len(threads[1]) == 1 and threads[0] != threads[1]
    assert [out.nfe_prefill for out in outs] == [[1]] * 6


def test_others_decode_while_an_image_is_encoded(model: Any) -> None:
    tower = Tower(model)
    tower.open.clear()
    with Engine(model, Words()) as engine:
        first = engine.submit(picture(20, 0), **OPTIONS)
        assert tower.reached.wait(60)
        assert engine.submit(inputs_of([20, 21]), **OPTIONS).result().num_new_tokens == [6]
        assert not first.is_done and engine.stats()["waiting"] == 1
        tower.open.set()
        assert first.result().num_new_tokens == [6]


def test_only_the_next_few_are_encoded_ahead(model: Any) -> None:
    """A full engine holds the features of few requests, however many wait."""
    tower, gate = Tower(model), Gate(model, pace_sec=0.02)
    with Engine(model, Words(), EngineSettings(max_rows=1)) as engine:
        running = engine.submit(inputs_of([20, 21]), max_new_tokens=900, eos_token_id=[])
        assert next(iter(running)) and gate.calls
        waiting = [engine.submit(picture(20, seed), **OPTIONS) for seed in range(AHEAD + 3)]
        wait_for(lambda: len(tower.counts) == AHEAD)
        steps = engine.stats()["steps"]
        wait_for(lambda: engine.stats()["steps"] > steps + 3)
        assert len(tower.counts) == AHEAD and engine.stats()["waiting"] == AHEAD + 3
        running.cancel()
        assert [request.result().finish_reasons for request in waiting] == [["length"]] * len(waiting)
    assert tower.counts == [1] * len(waiting)


def test_an_image_that_several_ask_for_is_encoded_once(model: Any) -> None:
    tower = Tower(model)
    tower.open.clear()
    with Engine(model, Words()) as engine:
        requests = [engine.submit(picture(word, 0), **OPTIONS) for word in (20, 21, 22)]
        wait_for(lambda: engine.stats()["encoding"] == 3)
        tower.open.set()
        for request in requests:
            request.result()
        assert engine.stats()["encoding"] == 0
    assert tower.counts == [1]


def test_a_fault_of_the_tower_is_one_request_s(model: Any) -> None:
    encode = model.encode_images
    with Engine(model, Words()) as engine:
        model.encode_images = lambda *_: (_ for _ in ()).throw(MemoryError("no room for the image"))
        bad = engine.submit(picture(20, 0), **OPTIONS)
        with pytest.raises(RequestError, match="no room for the image"):
            bad.result()
        model.encode_images = encode
        assert engine.submit(picture(20, 0), **OPTIONS).result().num_new_tokens == [6]
    assert engine.stats()["finished"] == {"error": 1, "length": 1}


def test_who_leaves_while_images_are_encoded_ends_at_once(model: Any) -> None:
    """Nothing else runs that would wake the engine; what was not begun is not encoded."""
    tower = Tower(model)
    tower.open.clear()
    with Engine(model, Words()) as engine:
        first = engine.submit(picture(20, 0), **OPTIONS)
        assert tower.reached.wait(60)
        left = engine.submit(picture(20, 1), **OPTIONS)
        late = engine.submit(picture(20, 2), timeout_sec=0.5, **OPTIONS)
        wait_for(lambda: left.encoding is not None and (late.encoding is not None or late.is_done))
        left.cancel()
        assert left.result().finish_reasons == ["cancelled"] and late.result().finish_reasons == ["timeout"]
        assert left.encoding is None and late.encoding is None
        first.cancel()
        assert first.result().finish_reasons == ["cancelled"] and not tower.open.is_set()
        tower.open.set()
    assert tower.counts == [1]


@pytest.mark.parametrize("drain", [True, False])
def test_closing_waits_for_the_image_under_way(model: Any, drain: bool) -> None:
    tower = Tower(model)
    tower.open.clear()
    engine = Engine(model, Words())
    requests = [engine.submit(picture(20, seed), **OPTIONS) for seed in range(2)]
    wait_for(lambda: engine.stats()["encoding"] == 2)
    second = requests[1].encoding
    assert tower.reached.wait(60) and second is not None
    told = second.features.cancelled if not drain else lambda: engine.is_closing
    threading.Thread(target=lambda: (wait_for(told), tower.open.set())).start()
    engine.close(drain=drain)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trimode-images")]
    for request in requests:
        if drain:
            assert request.result().num_new_tokens == [6]
        else:
            with pytest.raises(RequestError, match="shutting down"):
                request.result()
    assert len(tower.counts) == (2 if drain else 1)


@pytest.mark.parametrize("fate", ["fault", "cancel"])
def test_draining_ends_when_the_last_image_comes_to_nothing(model: Any, fate: str) -> None:
    tower = Tower(model)
    tower.open.clear()
    engine = Engine(model, Words())
    request = engine.submit(picture(20, 0), **OPTIONS)
    assert tower.reached.wait(60)
    closing = threading.Thread(target=engine.close, kwargs={"drain": True})
    closing.start()
    wait_for(lambda: engine.is_closing)
    if fate == "cancel":
        request.cancel()
        assert request.result().finish_reasons == ["cancelled"]
    else:
        engine.features.put = lambda *_: 1 / 0  # type: ignore[method-assign]
    tower.open.set()
    closing.join(60)
    assert not closing.is_alive() and request.is_done


def test_a_request_and_the_end_that_are_seen_together(model: Any) -> None:
    """The engine wakes once for both: it ends the request, and itself."""
    engine = Engine(model, Words())
    with engine._waiting._condition:
        request = engine.submit(inputs_of([20, 21]), **OPTIONS)
        engine._waiting.close("the engine is shutting down")
        request.cancel()
    engine.close(drain=True)
    assert request.result().finish_reasons == ["cancelled"] and not engine.is_alive


def test_a_fault_of_the_engine_forgets_the_images_to_come(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Tower(model)
    tower.open.clear()
    engine = Engine(model, Words())
    requests = [engine.submit(picture(20, seed), **OPTIONS) for seed in range(2)]
    assert tower.reached.wait(60)
    monkeypatch.setattr(engine, "_step", lambda *_: 1 / 0)
    requests.append(engine.submit(inputs_of([20, 21]), **OPTIONS))
    for request in requests:
        with pytest.raises(RequestError, match="division by zero"):
            request.result()
    wait_for(lambda: not engine.is_alive)
    tower.open.set()
    engine.close()
    assert tower.counts == [1]


def test_who_is_ready_starts_in_order_and_an_idle_engine_rests(model: Any) -> None:
    gate, started = Gate(model), []
    with Engine(model, Words(), EngineSettings(max_rows=1)) as engine:
        admit, start, rounds = engine._admit, engine._start, []
        engine._admit = lambda: (rounds.append(1), admit())[1]  # type: ignore[method-assign]
        engine._start = lambda request: (started.append(request), start(request))[1]  # type: ignore[method-assign]
        gate.close()
        requests = [engine.submit(inputs_of([20, 21]), **OPTIONS)]
        assert gate.reached.wait(60)
        requests += [engine.submit(inputs_of([20, 21 + i]), **OPTIONS) for i in range(5)]
        gate.open.set()
        for request in requests:
            request.result()

        def rests() -> bool:
            before = len(rounds)
            time.sleep(0.3)
            return len(rounds) == before

        wait_for(rests)
    assert started == requests


def test_an_answer_that_comes_to_hold_the_first_image_meanwhile(model: Any) -> None:
    """Both images were encoded when the request was asked for; only the second's features are placed."""
    one, two = picture(20, 0), picture(20, 1)
    said = model.generate(**one, max_new_tokens=20, eos_token_id=[]).sequences[0].tolist()
    turn = inputs_of(
        [*said, *SPAN, 31],
        pixel_values=torch.cat((one["pixel_values"], two["pixel_values"])),
        image_sizes=torch.tensor([[56, 56]] * 2),
    )
    alone = model.generate(**turn, **OPTIONS).sequences.tolist()
    tower = Tower(model)
    gate = Gate(model)
    with Engine(model, Words(), EngineSettings(max_rows=1, feature_cache_bytes=0)) as engine:
        gate.close()
        first = engine.submit(one, max_new_tokens=20, eos_token_id=[])
        assert gate.reached.wait(60)
        request = engine.submit(turn, **OPTIONS)
        gate.pace_sec = 0.02
        gate.open.set()
        first.result()
        assert request.result().sequences.tolist() == alone
    assert tower.counts == [1, 2] and request.cached_tokens > len(said) - 2


def test_images_of_one_value_and_two_sizes_differ(model: Any) -> None:
    def plain(height: int, width: int) -> dict[str, Any]:
        sizes = torch.tensor([[height, width]])
        rows, columns = height // 28, width // 28
        span = [5, *[*[4] * columns, 6] * (rows - 1), *[4] * columns, 7]
        return inputs_of([20, *span, 30], pixel_values=torch.ones(1, 3, height, width), image_sizes=sizes)

    asked = [plain(28, 56), plain(56, 28)]
    with Engine(model, Words()) as engine:
        outs = [engine.submit(inputs, **OPTIONS).result().sequences.tolist() for inputs in asked]
        assert engine.stats()["image_misses"] == 2
    assert outs == [model.generate(**inputs, **OPTIONS).sequences.tolist() for inputs in asked]


def test_a_conversation_s_next_turn_encodes_its_new_image_alone(model: Any) -> None:
    """Where the conversation that held the first image goes in the meantime, that image is encoded after all."""
    tower = Tower(model)
    one = picture(20, 0)
    two = picture(20, 1)["pixel_values"]
    settings = EngineSettings(feature_cache_bytes=0)
    for is_lost in (False, True):
        with Engine(model, Words(), settings) as engine:
            said = engine.submit(one, max_new_tokens=20, eos_token_id=[]).result().sequences[0].tolist()
            turn = inputs_of(
                [*said, *SPAN, 31],
                pixel_values=torch.cat((one["pixel_values"], two)),
                image_sizes=torch.tensor([[56, 56]] * 2),
            )
            del tower.counts[:]
            tower.open.clear()
            tower.reached.clear()
            request = engine.submit(turn, **OPTIONS)
            assert tower.reached.wait(60)
            if is_lost:
                engine.prefixes._entries.clear()
            tower.open.set()
            out = request.result()
        assert tower.counts == ([1, 2] if is_lost else [1])
        assert (request.cached_tokens > 0) is not is_lost
        assert out.sequences.tolist() == model.generate(**turn, **OPTIONS).sequences.tolist()
