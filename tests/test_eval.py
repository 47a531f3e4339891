"""The evaluation: counts, buckets, resume, controls and reports, on a scripted stub in place of model and processor."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimode_vlm.eval import nano_tasks, report, run, state
from trimode_vlm.eval.metrics import exact_match, mean, standard_error
from trimode_vlm.eval.tasks import EvalTask, Example, derangement, images_of, select, with_images
from trimode_vlm.eval.tpf import bucketed, totals

PAD = 0


def example(index: int, seed: int) -> Example:
    """The picture says which sample it is of; its answer has 3 * index + 1 letters (seed 1: 60 * index + 1)."""
    length = (60 if seed == 1 else 3) * index + 1
    content = [{"type": "image", "image": f"picture {index}"}, {"type": "text", "text": f"question {index}"}]
    return Example(id=index, messages=[{"role": "user", "content": content}], gold=chr(97 + index) * length, seed=seed)


TASKS = {
    "spell": EvalTask(name="spell", example=example, num_rows=50),
    "recite": EvalTask(name="recite", example=example, num_rows=3, needs_image=False, max_new_tokens=7),
}


class StubProcessor:
    """Characters are tokens; the prompt is the picture's number and the question's number."""

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
        assert options["add_generation_prompt"] and options["return_tensors"] == "pt"
        conversations = messages if isinstance(messages[0], list) else [messages]
        rows = []
        for conversation in conversations:
            picture, question = (part.get("image") or part["text"] for part in conversation[0]["content"])
            rows.append([int(picture.split()[1]), int(question.split()[1])])
        return {"input_ids": torch.tensor(rows)}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens and PAD not in ids
        return "".join(map(chr, ids))


class StubModel:
    """Spells the answer of the sample that the picture is of, in the forwards that each mode's rule asks for."""

    def __init__(self, seed: int = 0, fail_after: int | None = None) -> None:
        self.seed, self.fail_after, self.calls = seed, fail_after, []  # type: tuple[int, int | None, list[Any]]

    def generate(self, input_ids: Any, *, mode: str, max_new_tokens: int, do_sample: bool, **options: Any) -> Any:
        if self.fail_after is not None and len(self.calls) >= self.fail_after:
            raise KeyboardInterrupt
        assert not do_sample and ("threshold" in options) == (mode == "diffusion")
        self.calls.append((mode, input_ids.tolist(), max_new_tokens, options))
        golds = [example(picture, self.seed).gold for picture, _ in input_ids.tolist()]
        if mode == "diffusion":
            golds = [gold[:-1] + "!" for gold in golds]
        ids = [[ord(c) for c in gold][:max_new_tokens] for gold in golds]
        width = max(map(len, ids)) + 2
        rows = [
            [*prompt, *row, *[PAD] * (width - len(row))] for prompt, row in zip(input_ids.tolist(), ids, strict=True)
        ]
        accepted = [[4] * ((len(row) - 1) // 4) + ([(len(row) - 1) % 4] if (len(row) - 1) % 4 else []) for row in ids]
        decode = {
            "ar": [len(row) - 1 for row in ids],
            "diffusion": [len(row) for row in ids],
            "linear_spec": [2 * len(lengths) for lengths in accepted],
        }[mode]
        return SimpleNamespace(
            sequences=torch.tensor(rows),
            num_new_tokens=[len(row) for row in ids],
            nfe=[1 + n for n in decode],
            nfe_prefill=[1] * len(ids),
            seconds=[0.5] * len(ids),
            finish_reasons=["length" if len(row) == max_new_tokens else "stop" for row in ids],
            accepted_lengths=accepted if mode == "linear_spec" else [[] for _ in ids],
        )


@pytest.fixture(autouse=True)
def stub_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_tasks, "tasks", lambda: TASKS)


def settings(tmp_path: Path, **changes: Any) -> run.EvalSettings:
    base = run.EvalSettings(
        model="stub", tasks=("spell",), modes=("ar", "linear_spec"), output=str(tmp_path / "out"), limit=5
    )
    return replace(base, **changes)


def evaluate(chosen: run.EvalSettings, model: StubModel) -> dict[str, Any]:
    return run.evaluate(chosen, loader=lambda path, dtype, device: (model, StubProcessor()))


def lines(chosen: run.EvalSettings) -> list[dict[str, Any]]:
    return state.read_file(Path(chosen.output) / "samples.jsonl")


def record(tokens: int, forwards: int, prefill: int = 1, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"num_new_tokens": tokens, "nfe": forwards, "nfe_prefill": prefill, "seconds": seconds} | more


def test_tpf_is_pooled_and_not_a_mean_of_ratios() -> None:
    """9 tokens in 2 forwards and 1 + 100 tokens in 1 + 100: pooled (8 + 100) / (1 + 100)."""
    result = totals([record(9, 2, accepted_lengths=[8]), record(101, 101)])
    assert result.tpf_decode == (8 + 100) / (1 + 100)
    assert result.tpf_end_to_end == 110 / 103
    assert result.as_dict()["mean_accepted_length"] == 8 and result.as_dict()["tokens_per_sec"] == 55


def test_ar_is_exactly_one_in_both_conventions_and_nothing_is_none() -> None:
    result = totals([record(n, n) for n in (1, 2, 200)])
    assert result.tpf_decode == result.tpf_end_to_end == 1.0
    assert totals([record(1, 1)]).tpf_decode is None and totals([]).as_dict()["mean_tokens"] is None


def test_a_continued_cache_has_no_prefill_token_to_subtract() -> None:
    assert totals([record(8, 4, prefill=0)]).tpf_decode == 2.0


def test_buckets_nest_and_split_strictly_above() -> None:
    result = bucketed([record(n, n) for n in (1, 100, 101, 200, 201)], thresholds=(100, 200))
    assert {name: value.num_samples for name, value in result.items()} == {"all": 5, ">100": 3, ">200": 1}
    assert list(bucketed([], thresholds=(7,))) == ["all", ">7"]


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("a\nb", "a\r\nb ", 1.0),
        ("\n a", "a", 1.0),
        ("A", "a", 0.0),
        ("a  b", "a b", 0.0),
        ("a.", "a", 0.0),
        ("a\n\nb", "a\nb", 0.0),
        ("", "a", 0.0),
    ],
)
def test_exact_match_normalisation(prediction: str, gold: str, score: float) -> None:
    assert exact_match(prediction, gold).score == score


def test_standard_error_of_the_mean() -> None:
    assert mean([]) is None and standard_error([1.0]) is None
    assert standard_error([0.0, 1.0, 1.0, 1.0]) == pytest.approx(0.25)


@pytest.mark.parametrize("n", [2, 3, 10, 500])
def test_derangement_moves_every_sample(n: int) -> None:
    order = derangement(n, seed=3)
    assert sorted(order) == list(range(n)) and all(i != j for i, j in enumerate(order))
    assert order == derangement(n, seed=3)
    with pytest.raises(ValueError, match="found 1"):
        derangement(1, seed=0)


def test_with_images_swaps_pictures_only() -> None:
    swapped = with_images(example(1, 0), ["other"])
    assert images_of(swapped.messages) == ["other"] and images_of(example(1, 0).messages) == ["picture 1"]
    assert (
        swapped.messages[0]["content"][1] == example(1, 0).messages[0]["content"][1]
        and swapped.gold == example(1, 0).gold
    )
    with pytest.raises(ValueError, match="1 images but received 2"):
        with_images(example(1, 0), ["a", "b"])


def test_select_expands_groups_and_names_the_nearest() -> None:
    assert [task.name for task in select(["recite", "nano"])] == ["recite", "spell"]
    with pytest.raises(ValueError, match="did you mean 'spell'"):
        select(["spel"])


def test_report_numbers_equal_the_scripted_counts(tmp_path: Path) -> None:
    """Answers of 1, 4, 7, 10, 13 letters: 35 tokens, 5 of them from prefills; drafts of 4."""
    result = evaluate(settings(tmp_path), StubModel())
    ar, spec = (result["tasks"]["spell"][mode] for mode in ("ar", "linear_spec"))
    assert (ar["num_tokens"], ar["num_forwards"], ar["tpf_decode"], ar["tpf_end_to_end"]) == (35, 35, 1.0, 1.0)
    cycles = 0 + 1 + 2 + 3 + 3
    assert (spec["num_decode_forwards"], spec["num_prefill_forwards"]) == (2 * cycles, 5)
    assert spec["tpf_decode"] == 30 / (2 * cycles) and spec["mean_accepted_length"] == 30 / cycles
    assert spec["score"] == 1.0 and spec["standard_error"] == 0.0 and spec["seconds"] == 2.5
    assert spec["finish_reasons"] == {"stop": 5}
    assert result["same_as_ar"] == {"linear_spec": {"identical": 5, "of": 5}}
    assert result["convention"]["tpf_decode"] and json.loads(
        (tmp_path / "out" / "report.json").read_text()
    ) == json.loads(json.dumps(result))


def test_padding_after_the_end_is_neither_decoded_nor_counted(tmp_path: Path) -> None:
    chosen = settings(tmp_path, modes=("ar",), batch_size=5)
    evaluate(chosen, StubModel())
    assert [(r["prediction"], r["num_new_tokens"]) for r in lines(chosen)] == [
        (chr(97 + i) * (3 * i + 1), 3 * i + 1) for i in range(5)
    ]


def test_cut_answers_are_scored_as_they_are(tmp_path: Path) -> None:
    result = evaluate(settings(tmp_path, tasks=("recite",), modes=("ar", "diffusion")), StubModel())
    cell = result["tasks"]["recite"]
    assert cell["ar"]["num_samples"] == 3 and cell["ar"]["finish_reasons"] == {"stop": 2, "length": 1}
    assert cell["diffusion"]["score"] == 0.0 and result["same_as_ar"]["diffusion"] == {"identical": 0, "of": 3}
    short = evaluate(settings(tmp_path / "b", max_new_tokens=2, modes=("ar",)), StubModel())
    assert short["tasks"]["spell"]["ar"]["score"] == pytest.approx(1 / 5)


def test_buckets_hold_score_and_counts_of_the_long_answers(tmp_path: Path) -> None:
    result = evaluate(settings(tmp_path, seed=1, modes=("ar",)), StubModel(seed=1))
    lengths = result["pooled"]["ar"]
    assert [lengths[name]["num_tokens"] for name in ("all", ">100", ">200")] == [605, 543, 241]
    assert lengths[">200"]["num_samples"] == 1 and lengths[">200"]["score"] == 1.0


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
    path = tmp_path / "samples.worker0.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    with state.Writer(path) as writer:
        writer.append([{"c": "ü"}])
    assert state.read_file(path) == [{"a": 1}, {"c": "ü"}]
    path.write_bytes(b'{"a"\n{"b": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
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
        ("diffusion", {"threshold": 0.7, "block_length": 8}),
        ("linear_spec", {"block_length": 8}),
    ]


def test_markdown_and_the_readme_block(tmp_path: Path) -> None:
    chosen = settings(tmp_path, modes=("ar", "linear_spec", "diffusion"), shuffle_images=True)
    result = evaluate(chosen, StubModel())
    text = report.markdown(result)
    assert "| spell | 7 | 1.000 ± 0.000 | 1.000 ± 0.000 | 1.67 | 0.000 ± 0.000 | 0.86 |" in text
    assert "`linear_spec` gives the token ids of `ar` on 5/5 samples." in text
    widths = {line.count("|") for line in text.split("\n\n")[0].splitlines()}
    assert len(widths) == 1
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{report.START}\nold\n{report.END}\nrest\n", encoding="utf-8")
    assert report.main([str(tmp_path / "out" / "report.json"), "--update", str(readme)]) == 0
    assert readme.read_text(encoding="utf-8") == f"# Title\n{report.START}\n{text}\n{report.END}\nrest\n"
    readme.write_text("no marks", encoding="utf-8")
    assert report.main([str(tmp_path / "out" / "report.json"), "--update", str(readme)]) == 1
    assert readme.read_text(encoding="utf-8") == "no marks"


def test_larger_batches_report_no_speed(tmp_path: Path) -> None:
    text = report.markdown(evaluate(settings(tmp_path, batch_size=2), StubModel()))
    assert "tokens/s" not in text and "batch 2" in text


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in [
        (["--mode", "diffuson"], "unknown mode 'diffuson'; did you mean diffusion?"),
        (["--buckets", "100,many"], "--buckets takes numbers"),
        (["--tasks", "spel"], "did you mean 'spell'"),
        (["--tasks", ""], "no task is named"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "max new tokens must be at least 1"),
        (["--threshold", "2"], "threshold must lie in (0, 1]"),
        (["--block-length", "0"], "block_length must be a whole number of at least 1"),
        (["--dtype", "float99"], "float99"),
        (["--threshold", "0.9", "--mode", "ar,linear_spec"], "--threshold has no effect with --mode ar,linear_spec"),
        (["--block-length", "8", "--mode", "ar"], "--block-length has no effect with --mode ar"),
        (["--control-limit", "3"], "--control-limit has no effect without --control or --shuffle-images"),
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

    monkeypatch.setattr(run, "_load", load)
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


class BlindModel(StubModel):
    """Answers "x" to everything; the process that `TRIMODE_TEST_DIE` names dies before its third."""

    def generate(self, input_ids: Any, **options: Any) -> Any:
        self.calls.append(options)
        if multiprocessing.current_process().name == os.environ.get("TRIMODE_TEST_DIE") and len(self.calls) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        one = {"num_new_tokens": [1], "nfe": [1], "nfe_prefill": [1], "seconds": [0.1], "accepted_lengths": [[]]}
        sequences = torch.tensor([[*input_ids[0].tolist(), ord("x"), PAD]])
        return SimpleNamespace(sequences=sequences, finish_reasons=["stop"], **one)


class BlindProcessor(StubProcessor):
    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
        assert messages[-1]["role"] == "user"
        return {"input_ids": torch.ones(1, 4, dtype=torch.long)}


def blind_loader(path: str, dtype: Any, device: Any) -> tuple[Any, Any]:
    return BlindModel(), BlindProcessor()


def test_workers_share_the_samples_and_a_dead_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on two of nano's tasks, one killed in the middle; resumed by one process."""
    monkeypatch.undo()
    chosen = settings(tmp_path, tasks=("grid_cell", "text_spell"), limit=4, workers=2)
    monkeypatch.setenv("TRIMODE_TEST_DIE", "eval-worker-1")
    with pytest.raises(RuntimeError, match="worker 1 exited with code -9; .*goes on"):
        run.evaluate(chosen, loader=blind_loader)
    shards = [state.read_file(state.shard_path(Path(chosen.output), worker)) for worker in (0, 1)]
    assert [len(shard) for shard in shards] == [8, 2]
    assert [{r["id"] % 2 for r in shard} for shard in shards] == [{0}, {1}]
    run.evaluate(replace(chosen, workers=1), loader=blind_loader)
    alone = replace(chosen, workers=1, output=str(tmp_path / "alone"))
    run.evaluate(alone, loader=blind_loader)
    assert lines(chosen) == lines(alone) and len(lines(alone)) == 16


def test_held_out_nano_samples_are_no_training_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from trimode_vlm.training.synthetic import HELD_OUT_SEED

    tasks = select(["nano"])
    seeds = [task.example(i, seed).seed or 0 for task in tasks for seed in (0, 1) for i in (0, 999)]
    assert min(seeds) >= HELD_OUT_SEED and len(set(seeds)) == 4
    assert all(bool(images_of(task.example(0, 0).messages)) == task.needs_image for task in tasks)
    assert all(task.example(3, 1).messages[-1]["role"] == "user" for task in tasks)
