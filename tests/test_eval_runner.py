"""The runner: what it refuses, resumes, skips and scores anew, and that its counts are those of the backbone."""

from __future__ import annotations

import argparse
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
from naive import count_forwards
from PIL import Image

from trimode_vlm.decoders import DECODERS
from trimode_vlm.eval import answering, metrics, report, run, sources, state
from trimode_vlm.eval.scored import Scored
from trimode_vlm.eval.state import Key
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


def test_shuffled_images_are_other_samples_pictures(tmp_path: Path) -> None:
    model = StubModel()
    result = evaluate(settings(tmp_path, tasks=("nano",), shuffle_images=True, control_limit=4), model)
    shuffled = [r for r in lines(settings(tmp_path)) if r["run"] == "shuffled"]
    assert len(shuffled) == 4 and {r["task"] for r in shuffled} == {"spell"} and {r["mode"] for r in shuffled} == {"ar"}
    assert all(r["id"] != r["image_from"] for r in shuffled)
    assert sorted(r["image_from"] for r in shuffled) == [0, 1, 2, 3]
    table = result["controls"]["shuffled"]["tasks"]
    assert set(table) == {"spell"} and table["spell"]["ar"]["score"] == 0.0 and result["baseline"]["spell"] == 1 / 5
    assert [prompt for mode, [prompt], *_ in model.calls if prompt[0] != prompt[1]] == [
        [r["image_from"], r["id"]] for r in shuffled
    ]


def test_control_checkpoint_stands_beside_the_model(tmp_path: Path) -> None:
    paths: list[str] = []

    def loader(path: str, dtype: Any, device: Any) -> Any:
        paths.append(path)
        return StubModel(seed=0 if path == "stub" else 1), StubProcessor()

    result = run.evaluate(settings(tmp_path, control="ar-only", control_limit=2), loader=loader)
    assert paths == ["stub", "ar-only"]
    control = result["controls"]["control"]["tasks"]["spell"]
    assert (
        control["ar"]["num_samples"] == 2
        and control["ar"]["num_tokens"] == 62
        and control["linear_spec"]["score"] == 0.5
    )
    assert "control checkpoint" in report.markdown(result)


def test_options_reach_generate_only_where_the_mode_honours_them(tmp_path: Path) -> None:
    model = StubModel()
    evaluate(
        settings(tmp_path, modes=("ar", "diffusion", "linear_spec"), limit=1, block_length=8, threshold=0.7), model
    )
    assert [(mode, options) for mode, _, _, options in model.calls] == [
        ("ar", {}),
        ("diffusion", {"threshold": 0.7, "commit_rule": "confidence", "block_length": 8}),
        ("linear_spec", {"block_length": 8}),
    ]


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in [
        (["--mode", "diffuson"], "unknown mode 'diffuson'; did you mean diffusion?"),
        (["--buckets", "100,many"], "--buckets takes numbers"),
        (["--tasks", "spel"], "did you mean spell?"),
        (["--tasks", ""], "no task is named"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "max new tokens must be at least 1"),
        (["--threshold", "2"], "threshold must lie in (0, 1]"),
        (["--block-length", "0"], "block_length must be a whole number of at least 1"),
        (["--dtype", "float99"], "float99"),
        (["--threshold", "0.9", "--mode", "ar,linear_spec"], "--threshold has no effect with --mode ar,linear_spec"),
        (["--block-length", "8", "--mode", "ar"], "--block-length has no effect with --mode ar"),
        (["--control-limit", "3"], "--control-limit has no effect without --control or --shuffle-images"),
        (["--metric-style", "lmm"], "unknown metric style 'lmm' (known: vlmevalkit, lmms, strict)"),
        (["--on-error", "ignore"], "on_error must be raise or skip, got 'ignore'"),
        (["--max-new-tokens", "many"], "--max-new-tokens takes a number or TASK=NUMBER pairs"),
        (["--max-new-tokens", "spell="], "--max-new-tokens takes a number or TASK=NUMBER pairs"),
        (["--max-new-tokens", "3,4"], "--max-new-tokens takes a number or TASK=NUMBER pairs"),
        (["--max-new-tokens", "spel=3"], "--max-new-tokens spel=3: no such task in this run; did you mean spell?"),
        (["--max-new-tokens", "spell=0"], "--max-new-tokens spell=0: must be at least 1"),
        (["--data", "spell"], "--data takes TASK=PATH, found 'spell'"),
        (["--data", "spel=copies"], "--data spel=copies: no task here reads data"),
        (["--adapter", "auto", "--mode", "ar,diffusion"], "--adapter has no effect with --mode ar,diffusion"),
        (["--sampler", "folder"], "--sampler has no effect without --commit-rule learned"),
        (["--commit-rule", "entropy", "--threshold", "0.5"], "threshold has no effect with commit_rule='entropy'"),
        (["--commit-rule", "entropy", "--mode", "ar"], "--commit-rule has no effect with --mode ar"),
        (["--commit-rule", "random"], "unknown commit_rule 'random'"),
        (["--entropy-bound", "1"], "entropy_bound has no effect with commit_rule='confidence'"),
        (["--verifier-mix", "0.5"], "--verifier-mix has no effect"),
        (["--verification", "block"], "verification=block has no effect without do_sample=True"),
        (["--top-p", "0.5"], "--top-p has no effect without --temperature"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--quantize", "1bit"], "quantize"),
    ]:
        assert run.main(["eval", "--output", str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_the_threshold_that_is_not_given_is_the_default(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    chosen = run.from_arguments(parser.parse_args(["--output", str(tmp_path), "--mode", "ar"]))
    assert chosen.threshold == 0.9


@pytest.mark.parametrize("option", ["--model", "--control"])
def test_a_missing_checkpoint_stops_the_run_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    def load(path: str, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(answering, "load", load)
    missing, out = str(tmp_path / "nope"), tmp_path / "out"
    assert run.main(["eval", "--output", str(out), "--tasks", "spell", "--mode", "ar", option, missing]) == 1
    assert missing in capsys.readouterr().err.splitlines()[-1] and not out.exists()
    Path(missing).mkdir()
    assert run.main(["eval", "--output", str(out), "--tasks", "spell", "--mode", "ar", option, missing]) == 1
    assert "no config.json" in capsys.readouterr().err.splitlines()[-1] and not out.exists()


def test_a_folder_without_a_record_belongs_to_no_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(settings(tmp_path, model="other", seed=7), StubModel(fail_after=0))
    assert (tmp_path / "out" / "settings.json").exists()
    assert evaluate(settings(tmp_path), StubModel())["tasks"]["spell"]["ar"]["num_samples"] == 5
    with pytest.raises(ValueError, match="model 'stub', not 'other'"):
        evaluate(settings(tmp_path, model="other"), StubModel())


def test_the_papers_eight_benchmarks_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    names = "ai2d,chartqa,docvqa,mmmu,mmmu_pro,mmmu_pro_vision,mathvista,realworldqa"
    argv = f"--model M --tasks {names} --mode ar,diffusion,linear_spec --limit 3 --output {tmp_path}".split()
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    chosen = run.from_arguments(parser.parse_args(argv))
    assert ",".join(chosen.tasks) == names and chosen.modes == ("ar", "diffusion", "linear_spec")


def test_budgets_are_of_all_of_one_task_or_its_own(tmp_path: Path) -> None:
    for options, budgets in [([], [1024, 7]), (["5"], [5, 5]), (["recite=2"], [1024, 2]), (["9,recite=2"], [9, 2])]:
        parser = argparse.ArgumentParser()
        run.add_arguments(parser)
        given = [part for text in options for part in ("--max-new-tokens", text)]
        chosen = run.from_arguments(parser.parse_args(["--output", str(tmp_path), *given]))
        assert [chosen.budget(TASKS[name]) for name in ("spell", "recite")] == budgets
    model = StubModel()
    evaluate(settings(tmp_path, modes=("ar",), limit=1, task_budgets={"spell": 3}), model)
    assert model.calls[0][2] == 3
    with pytest.raises(ValueError, match="budget of spell 3, not 1024"):
        evaluate(settings(tmp_path, modes=("ar",), limit=2), StubModel())


def test_no_limit_is_the_whole_task_or_its_default(tmp_path: Path) -> None:
    def count(task: EvalTask, limit: int | None, **more: Any) -> int:
        return len(run.plan(settings(tmp_path, modes=("ar",), limit=limit, **more), [task]))

    assert [count(TASKS["spell"], n) for n in (None, 7, 70)] == [50, 7, 50]
    endless = replace(TASKS["spell"], num_rows=None, default_limit=20)
    assert [count(endless, n) for n in (None, 70)] == [20, 70]
    with pytest.raises(ValueError, match="spell has as many samples as you ask for: give --limit"):
        count(replace(endless, default_limit=None), None)
    assert count(TASKS["spell"], 7, control="other", control_limit=9) == 7 + 9


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_batches_and_shares_are_the_grid_of_ids(batch_size: int) -> None:
    """Over tasks, modes, gaps and numbers of processes: each sample once, no batch across a grid line or a gap."""
    ids = [0, 1, 2, 5, 6, 7, 8, 11]
    keys = [Key("model", task, mode, i, i) for task in "ab" for mode in ("ar", "diffusion") for i in ids]
    grid = answering.batches(keys, batch_size)
    assert [key for batch in grid for key in batch] == keys
    for batch in grid:
        first = batch[0].id
        assert [key.id for key in batch] == list(range(first, first + len(batch)))
        assert {key.id // batch_size for key in batch} == {first // batch_size} and len({k[:3] for k in batch}) == 1
    assert len(grid) == {1: 32, 3: 4 * 4, 4: 4 * 4}[batch_size]
    for count in (1, 2, 5, 40):
        shares = [answering.share(keys, batch_size, index, count) for index in range(count)]
        assert sorted(key for share in shares for key in share) == sorted(keys)
        found = [batch for share in shares for batch in answering.batches(share, batch_size)]
        assert sorted(found) == sorted(grid)


def test_records_hold_what_reports_and_metrics_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(index: int, seed: int) -> Example:
        info = {"question_id": f"q{index}", "choices": ["x", "y"]}
        return replace(example(index, seed), category="odd" if index % 2 else "even", info=info)

    monkeypatch.setitem(TASKS, "spell", replace(TASKS["spell"], example=make, macro=True))
    chosen = settings(tmp_path, modes=("ar",), limit=2)
    evaluate(chosen, StubModel())
    first, second = lines(chosen)
    hashes = {r.pop(name) for r in (first, second) for name in ("ids_hash", "question_hash")}
    assert len(hashes) == 4
    assert second == {
        **{"run": "model", "task": "spell", "mode": "ar", "id": 1, "image_from": 1, "question_id": "q1", "seed": 0},
        **{"category": "odd", "macro": True, "question": "question 1"},
        **{"prediction": "bbbb", "gold": "bbbb", "score": 1.0, "parsed": "bbbb"},
        **{"metric": "exact_match", "metric_style": "vlmevalkit", "num_new_tokens": 4, "nfe": 4, "nfe_prefill": 1},
        **{"prompt_tokens": 2, "seconds": 0.5, "seconds_to_first_token": None, "finish_reason": "stop"},
        **{"accepted_lengths": [], "info": {"question_id": "q1", "choices": ["x", "y"]}},
    }


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


def test_out_of_memory_answers_in_halves(tmp_path: Path) -> None:
    class Model(StubModel):
        def generate(self, input_ids: Any, **options: Any) -> Any:
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(input_ids, **options)

    chosen, model = settings(tmp_path, modes=("ar",), batch_size=5, limit=5), Model()
    with pytest.warns(UserWarning, match="spell: out of memory with [53] rows"):
        evaluate(chosen, model)
    assert [len(rows) for _, rows, *_ in model.calls] == [2, 1, 2] and len(lines(chosen)) == 5


def test_sampled_answers_depend_on_the_id_alone(tmp_path: Path, chat_model: Any, processor: Any) -> None:
    """One by one, in batches of two, and from the middle of a batch on: the same answers; another seed: others."""

    def answers(name: str, **changes: Any) -> list[str]:
        chosen = settings(tmp_path / name, modes=("ar",), temperature=1.0, max_new_tokens=6, limit=4, **changes)
        (Path(chosen.output)).mkdir(parents=True, exist_ok=True)
        run.evaluate(chosen, loader=lambda path, dtype, device: (chat_model, processor))
        return [r["prediction"] for r in lines(chosen)]

    def make(index: int, seed: int) -> Example:
        return Example(id=index, messages=[{"role": "user", "content": "Say something."}], gold="")

    TASKS_BEFORE = TASKS["spell"]
    TASKS["spell"] = EvalTask(name="spell", example=make, num_rows=4)
    try:
        alone = answers("alone")
        assert len(set(alone)) > 1 and answers("pairs", batch_size=2) == alone and answers("seed", seed=1) != alone
        pairs = tmp_path / "resumed" / "out" / "samples.jsonl"
        pairs.parent.mkdir(parents=True)
        source = tmp_path / "pairs" / "out"
        pairs.write_text(source.joinpath("samples.jsonl").read_text().splitlines(keepends=True)[0])
        pairs.with_name("settings.json").write_text(source.joinpath("settings.json").read_text())
        assert answers("resumed", batch_size=2) == alone
    finally:
        TASKS["spell"] = TASKS_BEFORE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "auto"], "has no linear_spec_lora/ beside its weights: give --adapter FOLDER"),
        (["--adapter", "tests"], "tests: no adapter_config.json, so this is not a PEFT adapter folder"),
        (
            ["--mode", "diffusion", "--commit-rule", "learned"],
            "has no learned_sampler/ beside its weights: give --sampler",
        ),
    ],
)
def test_a_missing_companion_stops_the_run_before_its_first_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    def load(path: str, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(answering, "load", load)
    (tmp_path / "config.json").touch()
    assert command(tmp_path, "--model", str(tmp_path), *options) == 1
    assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


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


def test_the_bar_shows_scores_and_tpf_of_everything_that_is_there(tmp_path: Path) -> None:
    from trimode_vlm.eval.progress import Progress

    chosen = settings(tmp_path, modes=("ar", "linear_spec"))
    evaluate(chosen, StubModel())
    records = lines(chosen)
    folder = tmp_path / "bar"
    with Progress(folder, 10, records[:4], is_shown=True) as progress:
        for worker, part in enumerate((records[4:7], [*records[7:9], {**records[9], "error": "unreadable"}])):
            with state.Writer(state.shard_path(folder, worker, state.SKIPPED if worker else state.MERGED)) as writer:
                writer.append(part)
            with state.shard_path(folder, worker, state.SKIPPED if worker else state.MERGED).open("a") as file:
                file.write('{"run": "mod')
        progress._next_look = 0.0
        progress.look()
        assert progress._bar.n == 10
        assert "ar=1.000 @ 1.00, linear_spec=1.000 @ 1.50" in str(progress._bar)


def test_lists_tasks_without_a_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert run.main(["eval", "--list-tasks"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("docvqa", "anls", "grid_json", "mmmu_pro_vision"))


@pytest.mark.parametrize("mode", DECODERS)
def test_the_reports_forwards_are_those_of_a_hook_and_its_tokens_those_before_the_end(
    mode: str, tmp_path: Path, chat_model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end token is put where AR's third answer has its fifth token: nothing behind it counts, its forwards do."""

    def make(index: int, seed: int) -> Example:
        image = {"type": "image", "image": Image.new("RGB", (56, 28), ("red", "green", "blue")[index])}
        content = [image, {"type": "text", "text": "word " * index}]
        return Example(id=index, messages=[{"role": "user", "content": content}], gold="")

    monkeypatch.setitem(TASKS, "spell", EvalTask(name="spell", example=make, num_rows=3, max_new_tokens=20))
    messages = make(2, 0).messages
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    prompt = inputs["input_ids"].shape[1]
    answer = chat_model.generate(**inputs, mode="ar", max_new_tokens=20).sequences[0, prompt:].tolist()
    end = answer[4]
    monkeypatch.setattr(chat_model.generation_config, "eos_token_id", end)
    sizes = count_forwards(chat_model)
    generate = chat_model.generate

    def generate_and_forget_the_warm_up(**options: Any) -> Any:
        out = generate(**options)
        if options["max_new_tokens"] == answering.WARM_UP_TOKENS:
            sizes.clear()
        return out

    monkeypatch.setattr(chat_model, "generate", generate_and_forget_the_warm_up)
    emitted: list[list[int]] = []
    decode = processor.decode
    monkeypatch.setattr(processor, "decode", lambda ids, **options: emitted.append(ids) or decode(ids, **options))
    chosen = settings(tmp_path, modes=(mode,), limit=3, dtype=None)
    result = run.evaluate(chosen, loader=lambda path, dtype, device: (chat_model, processor))
    cell = result["tasks"]["spell"][mode]
    assert cell["num_forwards"] == len(sizes) and set(sizes) == {1}
    assert all(end not in ids[:-1] for ids in emitted)
    assert [r["num_new_tokens"] for r in lines(chosen)] == [len(ids) for ids in emitted]
    if mode != "diffusion":
        assert len(emitted[2]) == answer.index(end) + 1 and lines(chosen)[2]["finish_reason"] == "stop"
    tokens = sum(map(len, emitted))
    assert cell["num_tokens"] == tokens and cell["tpf_decode"] == (tokens - 3) / (len(sizes) - 3)
    assert cell["tpf_end_to_end"] == tokens / len(sizes)
    assert cell["num_prefill_forwards"] == 3
