"""`bench train`: what it prints and refuses, and all that it measures without a clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import make_tiny_model

import trimode_vlm
from trimode_vlm import cli
from trimode_vlm.eval import bench_train
from trimode_vlm.eval.bench_train import STREAMS


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets threads for its process; here that is everybody's."""
    threads = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def nano() -> Any:
    return trimode_vlm.load("nano")


@pytest.fixture(scope="module")
def case(nano: Any) -> Any:
    """nano, one micro-batch per stream with a 448 pixel picture, and the pictures' features."""
    model, processor = nano
    torch.manual_seed(0)
    batches, pixels = bench_train.make_batches(model, processor, 2, bench_train.PICTURE_TOKENS_PER_SIDE)
    with torch.no_grad():
        return model, batches, pixels, model.encode_images(pixels)


def test_the_command_ends_with_its_json(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "train.json"
    assert cli.main(["bench", "train", "--quick", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line and not line.startswith((" ", "{"))]
    assert titles[0].startswith("the ceiling"), "the ceiling comes first"
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads(path.read_text())
    assert set(result) == {
        "settings", "ceiling", "same_result", "backbone_and_head", "with_vision_tower", "attention"
    }  # fmt: skip
    for name in STREAMS:
        assert result["backbone_and_head"]["seconds"][name] > 0
        assert result["backbone_and_head"]["speedup_over_allowed"][name] > 0
        assert all(values[name] < 1e-5 for values in result["same_result"].values())
    assert result["attention"]["largest_difference"] < 1e-5


def test_three_quarters_are_vision_and_lengths_are_what_the_names_say(case: Any) -> None:
    model, batches, _, features = case
    num_vision = 16 * 17 + 1  # 16 rows, each closed by a break or the end, behind one start
    assert len(features[0]) == 16 * 16
    num_tokens, num_response = num_vision * 4 // 3, bench_train.RESPONSE_TOKENS
    lengths = {name: batch.input_ids.shape[1] for name, batch in batches.items()}
    assert lengths == {
        "symmetric": 2 * num_tokens,
        "asymmetric": num_tokens // 4 + num_tokens,
        "response": num_response + num_tokens,
    }
    assert all(not (batch.document < 0).any() for batch in batches.values()), "padding would blur the token counts"


def test_the_allowed_gain_is_the_ratio_of_weights_times_tokens(case: Any) -> None:
    model, batches, *_ = case
    values = bench_train.ceiling(model, batches)
    layer = sum(p.numel() for name, p in model.encoder.layers[0].named_parameters() if "proj" in name)
    targets = {name: int((batch.target >= 0).sum()) for name, batch in batches.items()}
    assert len(set(targets.values())) == 1, "every stream has the same losses"
    flops = {
        name: layer * len(model.encoder.layers) * batch.input_ids.numel()
        + model.config.hidden_size * model.config.vocab_size * targets[name]
        for name, batch in batches.items()
    }
    for name, allowed in values["allowed_speedup"].items():
        assert allowed == pytest.approx(flops["symmetric"] / flops[name])


def test_all_streams_give_the_same_losses_and_gradients(case: Any) -> None:
    model, batches, pixels, _ = case
    for what, differences in bench_train.compare_results(model, batches, pixels).items():
        assert max(differences.values()) < 1e-5, what


def test_peak_memory_falls_with_the_tokens(case: Any) -> None:
    model, batches, _, features = case
    allowed = bench_train.ceiling(model, batches)["allowed_speedup"]
    peak = {
        name: bench_train.peak_bytes(lambda b=batch: bench_train.step(model, b, features), model.zero_grad)
        for name, batch in batches.items()
    }
    for name in ("asymmetric", "response"):
        assert peak["symmetric"] / peak[name] > 0.85 * allowed[name]


def test_peak_memory_is_what_lives_at_once() -> None:
    def call() -> None:
        for _ in range(3):
            both = torch.zeros(250_000) + torch.zeros(250_000)  # three of a megabyte for a moment
            del both

    assert bench_train.peak_bytes(call, lambda: None) == pytest.approx(3e6, rel=0.01)


def test_structured_attention_computes_less_than_a_third_of_the_pairs() -> None:
    pattern, dense = bench_train.attention_patterns(bench_train.ATTENTION | {"batch": 1})
    plan = pattern.dual_plan
    assert plan is not None and not plan.padding
    segments = [segment for document in plan.documents for segment in document.segments]
    computed = sum((segment.end - segment.start) * segment.num_keys for segment in segments)
    assert int(dense.attn_mask.sum()) <= computed < dense.attn_mask.numel() / 3


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--max-new-tokens", "5"], "--max-new-tokens is nothing to bench train: leave it out"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
    ],
)
def test_options_without_meaning_are_refused(argv: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["bench", "train", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_text_model_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(trimode_vlm, "load", lambda path: (make_tiny_model(vision=False), None))
    assert cli.main(["bench", "train", "--quick", "--model", "text"]) == 2
    assert "bench train needs a model that takes images" in capsys.readouterr().err
