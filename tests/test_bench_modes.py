"""`bench modes`: all that it says beside the clock."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import PROMPT, generate

from trimode_vlm import calibration
from trimode_vlm.eval import bench_modes
from trimode_vlm.eval.bench_modes import (
    acceptance,
    measure,
    plot,
    predicted_sec,
    text_of,
    time_runs,
    with_poor_drafts,
)
from trimode_vlm.eval.prompts import inputs_of


@pytest.fixture(autouse=True)
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of k tokens costs two forwards of 1 + k / 10 ms, whatever the machine says."""
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path))
    # Other tests' costs of the models that they share with these.
    monkeypatch.setattr(calibration, "_calibrations", weakref.WeakKeyDictionary())
    seconds = {tokens: 1e-3 + 1e-4 * tokens for tokens in calibration.TOKENS}
    monkeypatch.setattr(calibration, "measure", lambda model, rows: seconds)


def test_the_rate_of_a_run() -> None:
    """Of 1 + 3 + 3 + 0 tokens that held in blocks of 4, two blocks failed."""
    outputs: Any = [
        SimpleNamespace(accepted_lengths=[[2, 4], [4]], block_lengths=[[4, 4], [4]]),
        SimpleNamespace(accepted_lengths=[[1]], block_lengths=[[4]]),
    ]
    assert acceptance(outputs) == 7 / 9


def test_the_formula_follows_the_rows_as_they_leave() -> None:
    """Answers of 3 and 9 tokens: two cycles of AR with both rows, six with one. In the second batch four with one."""

    def cost(rows: int, k: int) -> float:
        return rows + 10.0 * k

    assert predicted_sec([[3, 9], [5]], 0.5, 1, cost) == 2 * 12 + 6 * 11 + 4 * 11
    # 1 + 1/2 + 1/4 + 1/8 tokens a cycle: 2, 5 and 3 cycles.
    assert predicted_sec([[3, 9], [5]], 0.5, 4, cost) == 2 * 42 + 3 * 41 + 3 * 41


def test_runs_take_turns_there_and_back_and_the_first_warms_up() -> None:
    """Of two batches; the run that is not compared takes one turn behind the one that warms up."""
    calls: list[tuple[str, int]] = []
    # Decode seconds by run and batch, turn by turn; the prefill took another 100.
    script = {
        ("a", 0): [50.0, 1.0, 9.0, 2.0],
        ("a", 1): [50.0, 7.0, 8.0, 9.0],
        ("b", 0): [50.0, 4.0, 4.0, 5.0],
        ("b", 1): [50.0, 1.0, 1.0, 1.0],
        ("once", 0): [50.0, 3.0],
        ("once", 1): [50.0, 2.0],
    }

    def generate(batch: int, mode: str, max_new_tokens: int) -> Any:
        seconds = script[mode, batch][calls.count((mode, batch))]
        calls.append((mode, batch))
        return SimpleNamespace(total_seconds=100 + seconds, seconds_to_first_token=[99.0, 100.0])

    batches, runs = [{"batch": 0}, {"batch": 1}], {name: {"mode": name} for name in ("a", "once", "b")}
    outputs, seconds = time_runs(SimpleNamespace(generate=generate), batches, runs, ("a", "b"), turns=3)
    assert seconds == {"a": 2 + 8, "once": 3 + 2, "b": 4 + 1}
    order = [["a", "once", "b"], ["b", "once", "a"], ["a", "b"], ["b", "a"]]
    assert calls == [(run, batch) for names in order for batch in (0, 1) for run in names]
    assert [len(outs) for outs in outputs.values()] == [2, 2, 2] and outputs["a"][1].total_seconds == 109
    calls.clear()
    assert time_runs(SimpleNamespace(generate=generate), batches, runs, ("a",), turns=1)[1]["b"] == 100


def test_poor_drafts_change_no_text_of_ar() -> None:
    model = make_tiny_model(seed=3, vision=False)
    spoilt = with_poor_drafts(model)
    chosen: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": -1}
    texts = [generate(m, [PROMPT], mode=mode, **chosen)[0] for m in (model, spoilt) for mode in ("ar", "linear_spec")]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    drafts = [
        [e.draft for e in m.stream(torch.tensor([PROMPT]), mode="linear_spec", **chosen)] for m in (model, spoilt)
    ]
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize(("repeats", "keeps"), [(1, None), (3, True)])
def test_one_repetition_gives_no_verdict(
    repeats: int, keeps: bool | None, chat_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"rate": 0.5, "parallel": {"1": {"auto_over_better": 0.96, "same_text": True}}}
    monkeypatch.setattr("trimode_vlm.load", lambda *args, **options: (chat_model, None))
    monkeypatch.setattr(bench_modes, "measure", lambda *args: result)
    monkeypatch.setattr(bench_modes, "text_of", lambda result: "")
    said: dict[str, Any] = {}
    args: Any = {"model": "nano", "dtype": None, "adapter": None, "samples": 1, "seed": 0, "plot": None}
    bench_modes.bench_modes(
        SimpleNamespace(repeats=repeats, **args), lambda name, _, values, *more: said.update({name: values})
    )
    both = ("own_drafts", "poor_drafts")
    assert said["verdict"] == {
        "least_auto_over_better": dict.fromkeys(both, 0.96),
        "within_5_percent": dict.fromkeys(both, keeps),
        "same_text_in_all_runs": True,
    }


def test_a_measurement_is_whole(
    chat_model: Any, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts are those of the answers; it goes into JSON, tables and a picture."""
    monkeypatch.setattr(bench_modes, "MAX_NEW_TOKENS", 10)
    monkeypatch.setattr(bench_modes, "PARALLEL", (1, 3, 16))
    asked = [[{"role": "user", "content": text}] for text in ("Hello", "Count to nine, please.", "What?")]
    result = measure(chat_model, processor, asked, repeats=1)
    assert json.loads(json.dumps(result))["block_length"] == 8 and list(result["parallel"]) == ["1", "3"]
    lengths = [
        chat_model.generate(**inputs_of(processor, [one]), mode="ar", max_new_tokens=10).num_new_tokens[0]
        for one in asked
    ]
    assert result["tokens"] == sum(lengths) - 3
    for cell in result["parallel"].values():
        assert cell["same_text"] and cell["tokens_per_sec"].keys() == {"ar", "auto", "linear_spec 4", "linear_spec 8"}
        assert cell["predicted_tokens_per_sec"]["ar"] == pytest.approx(
            result["tokens"] / 1.1e-3 / (result["tokens"] if cell is result["parallel"]["1"] else max(lengths) - 1)
        )
        better = max(cell["tokens_per_sec"]["ar"], cell["tokens_per_sec"]["linear_spec 8"])
        assert cell["auto_over_better"] == cell["tokens_per_sec"]["auto"] / better
    text = text_of(result)
    assert "| 3 | " in text and "linear_spec 8" in text and "measured / predicted" in text
    plot({"own_drafts": result}, tmp_path / "modes.png")
    assert (tmp_path / "modes.png").stat().st_size > 10_000
