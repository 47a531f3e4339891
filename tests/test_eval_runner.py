"""The runner: what it refuses, plans and records, and that its counts are those of the backbone."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_cases import TASKS, StubModel, StubProcessor, evaluate, example, lines, settings, stub_tasks  # noqa: F401
from naive import count_forwards
from PIL import Image

from trimode_vlm.decoders import DECODERS
from trimode_vlm.eval import answering, nano_tasks, report, run, state
from trimode_vlm.eval.state import Key
from trimode_vlm.eval.tasks import EvalTask, Example, select

all_tasks = nano_tasks.tasks  # a fixture puts others in its place


def command(tmp_path: Path, *options: str) -> int:
    return run.main(["eval", "--output", str(tmp_path / "out"), "--tasks", "spell", *options])


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
        (["--modes", "diffuson"], "unknown mode 'diffuson'; did you mean diffusion?"),
        (["--block-length", "eight"], "--block-length: must be a number of tokens or auto, found 'eight'"),
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


def test_sampled_answers_depend_on_the_id_alone(
    tmp_path: Path, chat_model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, in batches of two, and from the middle of a batch on: the same answers; another seed: others."""

    def answers(name: str, **changes: Any) -> list[str]:
        chosen = settings(tmp_path / name, modes=("ar",), temperature=1.0, max_new_tokens=6, limit=4, **changes)
        run.evaluate(chosen, loader=lambda path, dtype, device: (chat_model, processor))
        return [r["prediction"] for r in lines(chosen)]

    def make(index: int, seed: int) -> Example:
        return Example(id=index, messages=[{"role": "user", "content": "Say something."}], gold="")

    monkeypatch.setitem(TASKS, "spell", EvalTask(name="spell", example=make, num_rows=4))
    alone = answers("alone")
    assert len(set(alone)) > 1 and answers("pairs", batch_size=2) == alone and answers("seed", seed=1) != alone
    begun, pairs = tmp_path / "resumed" / "out", tmp_path / "pairs" / "out"
    begun.mkdir(parents=True)
    first_line = (pairs / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[0]
    (begun / "samples.jsonl").write_text(first_line, encoding="utf-8")
    (begun / "settings.json").write_bytes((pairs / "settings.json").read_bytes())
    assert answers("resumed", batch_size=2) == alone


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


def counting(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the forwards of every generate() call, as a hook counts them; warm-ups are left out."""
    sizes, calls = count_forwards(model), []
    generate = model.generate

    def counted(**options: Any) -> Any:
        sizes.clear()
        out = generate(**options)
        assert set(sizes) == {1}
        if options["max_new_tokens"] != answering.WARM_UP_TOKENS:
            calls.append(len(sizes))
        return out

    monkeypatch.setattr(model, "generate", counted)
    return calls


def test_forwards_on_nano_are_those_of_a_hook_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_tasks, "tasks", all_tasks)
    import trimode_vlm

    model, processor = trimode_vlm.load("nano")
    calls = counting(model, monkeypatch)
    chosen = settings(tmp_path, tasks=("text_spell", "grid_cell"), modes=tuple(DECODERS), limit=2, max_new_tokens=40)
    result = run.evaluate(chosen, loader=lambda path, **options: (model, processor))
    records = lines(chosen)
    order = run.plan(chosen, select(chosen.tasks))
    assert {state.key_of(r): r["nfe"] for r in records} == dict(zip(order, calls, strict=True))
    for mode, cell in result["tasks"]["text_spell"].items():
        mine = [r for r in records if r["mode"] == mode and r["task"] == "text_spell"]
        assert cell["num_forwards"] == sum(r["nfe"] for r in mine)
        # The answer's tokens and the end token, nothing behind it.
        ids = [processor.tokenizer(r["prediction"], add_special_tokens=False)["input_ids"] for r in mine]
        assert [r["num_new_tokens"] for r in mine] == [len(row) + 1 for row in ids]


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
    calls = counting(chat_model, monkeypatch)
    emitted: list[list[int]] = []
    decode = processor.decode
    monkeypatch.setattr(processor, "decode", lambda ids, **options: emitted.append(ids) or decode(ids, **options))
    chosen = settings(tmp_path, modes=(mode,), limit=3, dtype=None)
    result = run.evaluate(chosen, loader=lambda path, dtype, device: (chat_model, processor))
    cell = result["tasks"]["spell"][mode]
    assert cell["num_forwards"] == sum(calls) and [r["nfe"] for r in lines(chosen)] == calls
    assert all(end not in ids[:-1] for ids in emitted)
    assert [r["num_new_tokens"] for r in lines(chosen)] == [len(ids) for ids in emitted]
    if mode != "diffusion":
        assert len(emitted[2]) == answer.index(end) + 1 and lines(chosen)[2]["finish_reason"] == "stop"
    tokens = sum(map(len, emitted))
    assert cell["num_tokens"] == tokens and cell["tpf_decode"] == (tokens - 3) / (sum(calls) - 3)
    assert cell["tpf_end_to_end"] == tokens / sum(calls)
    assert cell["num_prefill_forwards"] == 3
