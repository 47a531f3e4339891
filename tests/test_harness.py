"""Our model inside lm-eval and lmms-eval, on local tasks of a few rows; skipped where they are not installed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import kits
import pytest

import trimode_vlm
from trimode_vlm.eval.harness import HarnessModel, batches, counted
from trimode_vlm.eval.prompts import inputs_of

ROWS = 4
LM_EVAL, LMMS_EVAL = "trimode_vlm.eval.lm_eval_model", "trimode_vlm.eval.lmms_eval_model"


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    return trimode_vlm.load("nano")


@pytest.fixture(scope="module")
def samples() -> list[Any]:
    from trimode_vlm.training import synthetic

    return [synthetic.make_sample("grid_cell", synthetic.HELD_OUT_SEED + i) for i in range(ROWS)]


def question(sample: Any) -> str:
    return next(part["text"] for part in sample.messages[0]["content"] if part["type"] == "text")


def picture(sample: Any) -> Any:
    return next(part["image"] for part in sample.messages[0]["content"] if part["type"] == "image")


def ours(nano: tuple[Any, Any], messages: list[dict[str, Any]], **options: Any) -> tuple[str, Any]:
    """The answer of our own generate, and its output."""
    model, processor = nano
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    out = model.generate(**inputs, do_sample=False, **options)
    ids = out.sequences[0, inputs["input_ids"].shape[1] :][: out.num_new_tokens[0]]
    return processor.decode(ids.tolist(), skip_special_tokens=True), out


def picture_table(samples: list[Any], folder: Path) -> Path:
    """The samples as a Parquet file with an image column, as on a hub."""
    columns = {"question": [question(s) for s in samples], "answer": [s.answer for s in samples]}
    table = datasets.Dataset.from_dict(
        columns | {"image": [picture(s) for s in samples]},
        features=datasets.Features(
            {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
        ),
    )
    table.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def test_generation_options_of_the_harnesses() -> None:
    model = HarnessModel("nano", mode="linear_spec", block_length=8)
    base = {"mode": "linear_spec", "block_length": 8, "do_sample": False}
    assert model.options({}) == (base | {"max_new_tokens": 1024}, [])
    assert model.options({"until": ["\n", ""], "max_gen_toks": 5, "temperature": 0, "top_p": 1.0, "num_beams": 1}) == (
        base | {"max_new_tokens": 5, "stop_strings": ["\n"]},
        ["\n"],
    )
    assert model.options(
        {"until": "END", "max_new_tokens": 7, "do_sample": False, "temperature": 0.7, "top_p": 0.9}
    ) == (
        base | {"max_new_tokens": 7, "stop_strings": ["END"]},
        ["END"],
    )
    sampled, _ = model.options({"temperature": 0.5, "top_p": 0.9, "top_k": None})
    assert sampled == base | {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 1024}
    assert model.options({"do_sample": True})[0]["temperature"] == 1.0
    with pytest.raises(ValueError, match="num_beams=4: no mode"):
        model.options({"num_beams": 4})
    with pytest.warns(UserWarning, match="does not use these options of the task: image_aspect_ratio"):
        model.options({"image_aspect_ratio": "original"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.options({"image_aspect_ratio": "original"})
    assert HarnessModel("nano", max_new_tokens=3).options({"max_new_tokens": 7})[0]["max_new_tokens"] == 3
    with pytest.raises(ValueError, match="mode 'ar' does not use 'threshold'"):
        HarnessModel("nano", mode="ar", threshold=0.5)


def test_the_seconds_of_a_batch_count_once() -> None:
    model = HarnessModel("nano")
    generate, outputs = model.model.generate, []

    def watched(**options: Any) -> Any:
        outputs.append(generate(**options))
        return outputs[-1]

    model.model.generate = watched
    asked = [[{"role": "user", "content": text}] for text in ("Hello", "Spell the word apple.", "What?")]
    model.answer(inputs_of(model.processor, asked), {"max_new_tokens": 9}, [True] * 3)
    seconds = [record["seconds"] for record in model.records]
    assert sum(seconds) == pytest.approx(max(outputs[0].seconds)) and min(seconds) > 0


def test_batches_share_options_and_begin_with_the_longest() -> None:
    generation = [{"until": ["a"]}, {"until": ["b"]}, {"until": ["a"]}, {"until": ["a"]}]
    assert list(batches("abcd", generation, [1, 9, 3, 2], 2)) == [[2, 3], [0], [1]]


def test_padding_requests_are_not_counted() -> None:
    """lm-eval repeats its last request; lmms-eval copies one and marks the copy. Repeats that a task asks for count."""
    first, last = SimpleNamespace(repeats=2, metadata=(None,)), SimpleNamespace(repeats=1, metadata=("task", 0, 1))
    assert counted([first, first, last, last, last]) == [True, True, True, False, False]
    copy = SimpleNamespace(repeats=1, metadata={"__padding_only__": True})
    assert counted([last, copy]) == [True, False]


def lm_eval_task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """A task of lm-eval on local rows."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def run_lm_eval(folder: Path, tasks: list[str], arguments: str, **options: Any) -> dict[str, Any]:
    lm_eval = kits.imported("lm_eval")
    kits.imported(LM_EVAL)
    manager = kits.imported("lm_eval.tasks").TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model="trimode_vlm", model_args=arguments, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
    )


@pytest.mark.parametrize("mode", ["ar", "linear_spec", "diffusion"])
def test_lm_eval_answers_are_ours(mode: str, nano: tuple[Any, Any], samples: list[Any], tmp_path: Path) -> None:
    """A task of questions about nothing: same text, same count of tokens and forwards, stop string left out."""
    rows = [{"question": question(sample)[: 20 + 9 * i], "answer": "3"} for i, sample in enumerate(samples)]
    rows[0]["question"] += " <image>"  # text here, for there is no picture
    lm_eval_task(
        tmp_path,
        "counting",
        rows,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["e"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    arguments = f"pretrained=nano,mode={mode},tpf_output={tmp_path / 'tpf.json'}"
    found = run_lm_eval(tmp_path, ["counting"], arguments, apply_chat_template=True, batch_size=3)
    tokens = forwards = 0
    answers = [sample["resps"][0][0] for sample in found["samples"]["counting"]]
    for row, answer in zip(rows, answers, strict=True):
        text, out = ours(
            nano,
            [{"role": "user", "content": row["question"]}],
            mode=mode,
            max_new_tokens=24,
            stop_strings=["e"],
            tokenizer=nano[1].tokenizer,
        )
        assert answer == text.split("e")[0]
        tokens, forwards = tokens + out.num_new_tokens[0], forwards + out.nfe[0]
    assert len(set(answers)) > 1
    right = sum(answer == "3" for answer in answers) / ROWS
    assert found["results"]["counting"]["exact_match,none"] == right
    counted = json.loads((tmp_path / "tpf.json").read_text())["by_length"]["all"]
    assert (counted["num_samples"], counted["num_tokens"], counted["num_forwards"]) == (ROWS, tokens, forwards)


def test_lm_eval_likelihoods_are_transformers_own(nano: tuple[Any, Any]) -> None:
    """HFLM on transformers' class with the same weights: pairs, empty contexts, rolling windows; batched."""
    hflm = kits.imported("lm_eval.models.huggingface").HFLM
    module = kits.imported(LM_EVAL)
    from trimode_vlm.eval.bench_decode import as_transformers

    theirs = hflm(
        pretrained=as_transformers(nano[0]), tokenizer=nano[1].tokenizer, backend="causal", batch_size=3, max_length=48
    )
    mine = module.TriModeLM("nano", mode="linear_spec", batch_size=3, max_length=48)
    texts = ["the red star", "a count of", "What is", "", "json", "x" * 30]
    pairs = [SimpleNamespace(args=(text, f" {other}{i}")) for i, text in enumerate(texts) for other in ("two", "cells")]
    for (a, greedy), (b, its_greedy) in zip(mine.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert a == pytest.approx(b, abs=1e-3) and greedy == its_greedy
    whole = [SimpleNamespace(args=(f"How many red stars are there? {text} " * 3,)) for text in texts]
    assert mine.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), abs=1e-2)


def test_lm_eval_choices_and_perplexity(tmp_path: Path) -> None:
    lm_eval_task(
        tmp_path,
        "choice",
        [{"question": "red", "choices": ["star", "cell"], "label": i % 2} for i in range(ROWS)],
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="label",
        doc_to_choice="choices",
    )
    lm_eval_task(
        tmp_path,
        "reading",
        [{"text": "red star"}, {"text": "a count"}],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity"}],
    )
    results = run_lm_eval(tmp_path, ["choice", "reading"], "pretrained=nano", batch_size=2)["results"]
    assert results["choice"]["acc,none"] == 0.5  # the same question with both labels
    assert 1 < results["reading"]["byte_perplexity,none"] < 1e6


def test_lm_eval_shows_pictures(nano: tuple[Any, Any], samples: list[Any], tmp_path: Path) -> None:
    """A multimodal task: pictures where the text marks them, as in our own messages."""
    file = picture_table(samples, tmp_path)
    task = {
        "task": "seeing",
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_image": ["image"],
        "doc_to_text": "<image>{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<none>"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "seeing.yaml").write_text(json.dumps(task))
    found = run_lm_eval(tmp_path, ["seeing"], "pretrained=nano", apply_chat_template=True, batch_size=2)
    answers = [sample["resps"][0][0] for sample in found["samples"]["seeing"]]
    expected = [
        ours(nano, [{"role": "user", "content": [part(sample), text_part(sample)]}], mode="ar", max_new_tokens=24)[0]
        for sample in samples
    ]
    assert answers == expected
    right = sum(answer == sample.answer for answer, sample in zip(answers, samples, strict=True)) / ROWS
    assert found["results"]["seeing"]["exact_match,none"] == right


def part(sample: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture(sample)}


def text_part(sample: Any) -> dict[str, Any]:
    return {"type": "text", "text": question(sample)}


UTILS = """
def pictures(doc):
    return [doc["image"].convert("RGB")]

def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def results(doc, results):
    return {"exact_match": float(results[0].strip() == doc["answer"])}
"""


@pytest.mark.parametrize("force_simple", [False, True])
def test_lmms_eval_answers_are_ours(
    force_simple: bool, nano: tuple[Any, Any], samples: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local task of lmms-eval through its evaluator, by chat messages and by the older interface."""
    evaluator = kits.imported("lmms_eval.evaluator")
    # lmms-eval 0.7.3 changes what only filelock before 4 has, against a deadlock of nested loads; there are none here.
    monkeypatch.setattr(evaluator, "_enable_reentrant_filelocks", lambda: None)
    registry = kits.imported("lmms_eval.models").MODEL_REGISTRY_V2
    registry.register_manifest(kits.imported(LMMS_EVAL).manifest(), overwrite=True)
    file = picture_table(samples, tmp_path)
    (tmp_path / "utils.py").write_text(UTILS)
    (tmp_path / "seeing.yaml").write_text(
        f"""
task: seeing
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.pictures
doc_to_text: !function utils.text
doc_to_target: answer
process_results: !function utils.results
generation_kwargs:
  max_new_tokens: 24
  temperature: 0
  do_sample: false
  num_beams: 1
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
    )
    tasks = kits.imported("lmms_eval.tasks").TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = evaluator.simple_evaluate(
        model="trimode_vlm",
        model_args=f"pretrained=nano,mode=linear_spec,tpf_output={tmp_path / 'tpf.json'}",
        tasks=["seeing"],
        task_manager=tasks,
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
        force_simple=force_simple,
    )
    expected = [
        ours(nano, [{"role": "user", "content": [part(s), text_part(s)]}], mode="linear_spec", max_new_tokens=24)
        for s in samples
    ]
    answers = [sample["filtered_resps"][0] for sample in found["samples"]["seeing"]]
    assert answers == [text for text, _ in expected]
    right = sum(answer == sample.answer for answer, sample in zip(answers, samples, strict=True)) / ROWS
    assert found["results"]["seeing"]["exact_match,none"] == right
    counted = json.loads((tmp_path / "tpf.json").read_text())["by_length"]["all"]
    assert counted["num_forwards"] == sum(out.nfe[0] for _, out in expected)


def test_lmms_eval_likelihoods_are_lm_evals(samples: list[Any]) -> None:
    """Without pictures the same chat through lm-eval gives the same sums; with one, the picture matters."""
    lmms_model = kits.imported(LMMS_EVAL).TriModeSimple("nano")
    lm_model = kits.imported(LM_EVAL).TriModeLM("nano")
    lmms_model.task_dict = {"task": {"test": samples}}
    prompt = lm_model.apply_chat_template([{"role": "user", "content": question(samples[0])}])

    def found(pictures: Any) -> list[tuple[float, bool]]:
        rows = [(question(samples[0]), answer, pictures, 0, "task", "test") for answer in ("3", "red star")]
        return lmms_model.loglikelihood([SimpleNamespace(args=row) for row in rows])

    blind = found(lambda doc: [])
    # Through tokens, because lm-eval counts the line end of the rendered prompt among the answer's characters.
    ids = lm_model.answers.processor(text=prompt)["input_ids"][0].tolist()
    tokens = [lm_model.tok_encode(answer, add_special_tokens=False) for answer in ("3", "red star")]
    theirs = lm_model._loglikelihood_tokens([(("", ""), ids, answer) for answer in tokens])
    for (a, greedy), (b, its_greedy) in zip(blind, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-3) and greedy == its_greedy
    assert found(lambda doc: [picture(doc)])[0][0] != pytest.approx(blind[0][0], abs=0.1)


@pytest.mark.parametrize("error", [None, RuntimeError("the picture is gone")])
def test_lmms_evals_command_says_whether_the_evaluation_died(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, module = kits.imported("lmms_eval.__main__"), kits.imported(LMMS_EVAL)

    def evaluate(args: Any) -> tuple[None, None]:
        if error:
            raise error
        return None, None

    monkeypatch.setattr(command, "cli_evaluate_single", evaluate)
    monkeypatch.setattr("sys.argv", ["lmms-eval", "--model", "trimode_vlm", "--tasks", "none"])
    assert module.run_command() == (1 if error else 0)
    assert ("the picture is gone" in capsys.readouterr().err) == bool(error)


def test_lmms_eval_refuses_what_it_cannot_show() -> None:
    module = kits.imported(LMMS_EVAL)
    model = module.TriModeChat("nano")
    model.task_dict = {"task": {"test": [None]}}
    video = [{"role": "user", "content": [{"type": "video", "url": "a.mp4"}]}]
    request = SimpleNamespace(args=("", lambda doc: video, {}, 0, "task", "test"))
    with pytest.raises(ValueError, match="takes text and pictures, and this task has a part of type 'video'"):
        model.generate_until([request])
    with pytest.raises(NotImplementedError, match="single-round"):
        model.generate_until_multi_round([])
