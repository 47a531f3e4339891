"""What an interrupted, broken, changed or repeated evaluation keeps, refuses, skips and scores anew."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_cases import TASKS, StubModel, StubProcessor, evaluate, example, lines, settings, stub_tasks  # noqa: F401
from PIL import Image

from trimode_vlm.eval import answering, metrics, run, sources, state
from trimode_vlm.eval.run_folder import fingerprint
from trimode_vlm.eval.scored import Scored
from trimode_vlm.eval.tasks import EvalTask, Example


def command(tmp_path: Path, *options: str) -> int:
    return run.main(["eval", "--output", str(tmp_path / "out"), "--tasks", "spell", *options])


def test_a_kill_resumes_without_a_duplicate(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(chosen, StubModel(fail_after=7))
    shard = tmp_path / "out" / "samples.worker0.jsonl"
    with shard.open("a", encoding="utf-8") as file:
        file.write('{"run": "model", "task": "spell", "mo')
    rest = StubModel()
    result = evaluate(chosen, rest)
    assert len(rest.calls) == 3 and not shard.exists()
    assert len({state.key_of(r) for r in lines(chosen)}) == len(lines(chosen)) == 10
    again = StubModel()
    fresh = evaluate(replace(chosen, output=str(tmp_path / "fresh")), StubModel())
    assert evaluate(chosen, again) == result and again.calls == []
    assert {**fresh, "settings": None} == {**result, "settings": None}


def test_a_torn_tail_is_cut_before_the_next_append(tmp_path: Path) -> None:
    one = {"run": "model", "task": "t", "mode": "ar", "id": 0, "image_from": 0}
    path = tmp_path / "samples.worker0.jsonl"
    path.write_bytes(json.dumps(one).encode() + b'\n{"run": ')
    with state.Writer(path) as writer:
        writer.append([{**one, "id": 1, "c": "ü"}])
    assert state.read_file(path) == [one, {**one, "id": 1, "c": "ü"}]
    for content, message in ((b'{"a"\n{"b": 1}\n', "line 1: not JSON"), (b'{"run": "model"}\n', "line 1: no record")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            state.read_file(path)


def test_duplicates_over_files_count_once(tmp_path: Path) -> None:
    one = {"run": "model", "task": "t", "mode": "ar", "id": 3, "image_from": 3}
    for name in ("samples.jsonl", "samples.worker0.jsonl", "samples.worker1.jsonl"):
        with state.Writer(tmp_path / name) as writer:
            writer.append([{**one, "at": name}, {**one, "id": 4}])
    merged = state.merge(tmp_path)
    assert [key.id for key in merged] == [3, 4] and merged[state.key_of(one)]["at"] == "samples.jsonl"
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_run_may_grow_but_not_change(tmp_path: Path) -> None:
    evaluate(settings(tmp_path, limit=2), StubModel())
    more = StubModel()
    evaluate(settings(tmp_path, limit=3, modes=("ar", "linear_spec", "diffusion")), more)
    assert len(more.calls) == 2 + 3
    with pytest.raises(ValueError, match="threshold 0.9, not 0.5.*another --output"):
        evaluate(settings(tmp_path, threshold=0.5), StubModel())
    with pytest.raises(ValueError, match="model 'stub', not 'other'"):
        evaluate(settings(tmp_path, model="other"), StubModel())


def test_a_folder_without_a_record_belongs_to_no_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(settings(tmp_path, model="other", seed=7), StubModel(fail_after=0))
    assert (tmp_path / "out" / "settings.json").exists()
    assert evaluate(settings(tmp_path), StubModel())["tasks"]["spell"]["ar"]["num_samples"] == 5
    with pytest.raises(ValueError, match="model 'stub', not 'other'"):
        evaluate(settings(tmp_path, model="other"), StubModel())


def test_another_style_scores_the_stored_answers_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric sees gold and info as they were answered; other tasks' records of the folder follow too."""

    def metric(prediction: str, gold: Any, info: Any, style: str) -> Scored:
        return Scored(float(style == info["right in"] and prediction == gold), style)

    def make(index: int, seed: int) -> Example:
        return replace(example(index, seed), info={"right in": "strict" if index else "lmms"})

    monkeypatch.setitem(metrics.METRICS, "styled", metric)
    for name in TASKS:
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], example=make, metric="styled", max_new_tokens=99))
    chosen = settings(tmp_path, tasks=("spell", "recite"), modes=("ar",), limit=3, metric_style="lmms")
    assert evaluate(chosen, StubModel())["tasks"]["spell"]["ar"]["score"] == pytest.approx(1 / 3)
    before = [r["prediction"] for r in lines(chosen)]
    model = StubModel()
    again = evaluate(replace(chosen, tasks=("spell",), metric_style="strict"), model)
    assert model.calls == [] and again["tasks"]["spell"]["ar"]["score"] == pytest.approx(2 / 3)
    assert [(r["metric_style"], r["parsed"], r["score"]) for r in lines(chosen)] == [
        ("strict", "strict", score) for score in (0, 1, 1, 0, 1, 1)
    ]
    assert [r["prediction"] for r in lines(chosen)] == before


def test_weights_that_differ_late_in_the_file_are_another_model(tmp_path: Path) -> None:
    """Such as those of a fine-tuned copy with frozen embeddings, which come first."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(32 << 20))
    before = fingerprint(str(tmp_path))
    assert before == fingerprint(str(tmp_path))
    with weights.open("rb+") as file:
        file.seek(31 << 20)
        file.write(b"\1" * (64 << 10))
    assert fingerprint(str(tmp_path)) != before


def test_changed_data_is_an_error_that_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the fingerprint changed are rows read again; rows that came behind the answered ones do no harm."""
    gold, question, picture, version = "aaaa", "?", "white", "1"
    made: list[int] = []

    def make(index: int, seed: int) -> Example:
        made.append(index)
        image = Image.new("RGB", (4, 4), picture if index == 1 else "black")
        content = [{"type": "image", "image": image}, {"type": "text", "text": question if index == 1 else "same"}]
        return Example(id=index, messages=[{"role": "user", "content": content}], gold=gold if index == 1 else ["b"])

    class Processor(StubProcessor):
        def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[0, 0]])}

    def go(limit: int) -> None:
        model = StubModel()
        run.evaluate(
            settings(tmp_path, modes=("ar",), limit=limit), loader=lambda path, dtype, device: (model, Processor())
        )

    monkeypatch.setitem(TASKS, "spell", EvalTask(name="spell", example=make, num_rows=4, fingerprint=lambda: version))
    go(2)
    made.clear()
    go(2)
    assert made == [0]
    version = "2"
    go(3)
    assert made == [0, 0, 1, 2]
    kept = gold, question, picture
    for field, *changed in (
        ("gold", "b", "?", "white"),
        ("question", "aaaa", "??", "white"),
        ("question", "aaaa", "?", "red"),
    ):
        version += "changed"
        gold, question, picture = changed
        with pytest.raises(ValueError, match=f"spell, row 1: {field} changed since.*choose another --output"):
            go(3)
    gold, question, picture = kept
    go(3)


def test_an_edited_file_is_noticed_by_its_row(tmp_path: Path, chat_model: Any, processor: Any) -> None:
    """The user's own JSONL: rows may be appended to it, an answered one may not change."""
    file = tmp_path / "mine.jsonl"
    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(3)]

    def go() -> int:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sources._open.cache_clear()  # as in another process
        chosen = settings(tmp_path, tasks=(str(file),), modes=("ar",), limit=None, max_new_tokens=2)
        result = run.evaluate(chosen, loader=lambda path, dtype, device: (chat_model, processor))
        return result["tasks"]["mine"]["ar"]["num_samples"]

    assert go() == 3
    rows.append({"question": "Say 3.", "answer": "3"})
    assert go() == 4
    rows[2]["answer"] = "two"
    with pytest.raises(ValueError, match="mine, row 2: gold changed since it was answered"):
        go()


class BrokenProcessor(StubProcessor):
    """Cannot read the pictures named in `broken`, in whatever batch they come."""

    broken: tuple[int, ...] = ()

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
        inputs = super().apply_chat_template(messages, **options)
        for picture, _ in inputs["input_ids"].tolist():
            if picture in self.broken:
                raise ValueError(f"picture {picture}: not an image")
        return inputs


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_broken_sample_is_named_or_skipped_and_counted(tmp_path: Path, batch_size: int) -> None:
    processor = BrokenProcessor()
    processor.broken = (1, 5)

    def go(on_error: str) -> tuple[dict[str, Any], StubModel]:
        model = StubModel()
        chosen = settings(tmp_path, limit=6, batch_size=batch_size, on_error=on_error)
        return run.evaluate(chosen, loader=lambda path, dtype, device: (model, processor)), model

    message = r"spell, row 1: picture 1: not an image \(picture 1\); --on-error skip leaves such samples out"
    with pytest.raises(answering.SampleError, match=message):
        go("raise")
    assert [r["id"] for r in state.read(tmp_path / "out").values()] == [0]
    result, _ = go("skip")
    assert result["settings"]["skipped"] == {"spell": {"ar": 2, "linear_spec": 2}}
    assert result["tasks"]["spell"]["ar"]["num_samples"] == 4 and result["tasks"]["spell"]["ar"]["score"] == 1.0
    skipped = state.read_file(tmp_path / "out" / "skipped.jsonl")
    assert [(r["mode"], r["id"]) for r in skipped] == [(m, i) for m in ("ar", "linear_spec") for i in (1, 5)]
    assert {r["error"] for r in skipped} == {"picture 1: not an image", "picture 5: not an image"}
    processor.broken = (5,)
    result, model = go("skip")
    assert len(model.calls) == 2 and result["settings"]["skipped"] == {"spell": {"ar": 1, "linear_spec": 1}}
    processor.broken = ()
    assert go("raise")[0]["settings"]["skipped"] == {} and not (tmp_path / "out" / "skipped.jsonl").exists()
    assert len(lines(settings(tmp_path))) == 12


def test_what_a_killed_run_had_skipped_is_not_counted_again(tmp_path: Path) -> None:
    """The bar follows the shards, so those of an earlier run are merged before it starts."""
    chosen = settings(tmp_path, on_error="skip")
    shard = state.shard_path(tmp_path / "out", 3, state.SKIPPED)
    with state.Writer(shard) as writer:
        writer.append([{"run": "model", "task": "spell", "mode": "ar", "id": 1, "image_from": 1, "error": "?"}])
    with pytest.raises(KeyboardInterrupt):
        evaluate(chosen, StubModel(fail_after=0))
    assert not shard.exists() and len(state.read_file(tmp_path / "out" / "skipped.jsonl")) == 1
    assert evaluate(chosen, StubModel())["settings"]["skipped"] == {}


def test_a_run_without_one_readable_sample_reports_nothing(tmp_path: Path) -> None:
    processor = BrokenProcessor()
    processor.broken = (0, 1)
    with pytest.raises(ValueError, match="every sample was skipped, the first because of: picture 0"):
        run.evaluate(
            settings(tmp_path, limit=2, on_error="skip"), loader=lambda path, dtype, device: (StubModel(), processor)
        )


def test_a_fault_that_is_no_samples_is_never_skipped(tmp_path: Path) -> None:
    class Model(StubModel):
        def generate(self, *args: Any, **options: Any) -> Any:
            raise TypeError("a bug")

    message = r"spell, row 0: TypeError: a bug \(--debug shows where\) \(picture 0\)$"
    with pytest.raises(answering.SampleError, match=message):
        evaluate(settings(tmp_path, on_error="skip"), Model())


def test_one_evaluation_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    with state.lock(tmp_path / "out"), pytest.raises(ValueError, match="another evaluation is writing here"):
        evaluate(settings(tmp_path), StubModel())
    evaluate(settings(tmp_path), StubModel())


@pytest.mark.parametrize(("content", "words"), [(None, "is missing"), ('{"seed": ', "is damaged")])
def test_answers_without_their_settings_are_not_taken_for_this_runs(
    tmp_path: Path, content: str | None, words: str
) -> None:
    evaluate(settings(tmp_path), StubModel())
    file = tmp_path / "out" / "settings.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ValueError, match=f"settings.json {words}"):
        evaluate(settings(tmp_path), StubModel())


def test_a_full_disk_loses_no_written_line(tmp_path: Path) -> None:
    record = {"run": "model", "task": "t", "mode": "ar", "id": 0, "image_from": 0, "prediction": "x" * 100}
    path, whole = tmp_path / "samples.worker0.jsonl", tmp_path / "whole.jsonl"
    state.replace(whole, [record])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with state.Writer(path) as writer:
        writer.append([record])
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        try:
            with pytest.raises(OSError, match="File too large: .*worker0"):
                writer.append([{**record, "id": 1}, {**record, "id": 2}])
            with pytest.raises(OSError, match="File too large: .*whole"):
                state.replace(whole, [record] * 9)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert state.read_file(path) == [record] == state.read_file(whole)
    with state.Writer(path) as writer:
        writer.append([{**record, "id": 1}])
    assert [r["id"] for r in state.read_file(path)] == [0, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, whole.name]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_command_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    class Model(StubModel):
        def generate(self, *args: Any, **options: Any) -> Any:
            if len(self.calls) == 2:
                os.kill(os.getpid(), number)
            return super().generate(*args, **options)

    monkeypatch.setattr(answering, "load", lambda path, **options: (Model(), StubProcessor()))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command(tmp_path, "--mode", "ar", "--limit", "4") == code
    except SystemExit as stop:
        assert stop.code == code
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"the same command again goes on from what is in {tmp_path / 'out'}" in capsys.readouterr().err
    assert len(state.read(tmp_path / "out")) == 2
    monkeypatch.setattr(answering, "load", lambda path, **options: (StubModel(), StubProcessor()))
    assert command(tmp_path, "--mode", "ar", "--limit", "4") == 0
    assert "| spell |" in capsys.readouterr().out
