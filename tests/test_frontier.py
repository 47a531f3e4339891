"""`bench frontier`: its sweep, its figures against those of `eval`, its Pareto front against brute force."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from trimode_vlm import cli, load
from trimode_vlm.eval import bench, frontier_report
from trimode_vlm.eval.bench_frontier import Point, measure, sweep
from trimode_vlm.eval.frontier_report import pareto
from trimode_vlm.eval.tasks import select


def arguments(*argv: str) -> argparse.Namespace:
    parser = cli.Parser()
    bench.add_arguments(parser)
    args = parser.parse(["frontier", *argv])
    bench.check(args)
    return args


@pytest.mark.parametrize("seed", range(30))
def test_pareto_is_that_of_brute_force(seed: int) -> None:
    """Few distinct values, so that points tie in one coordinate and in both."""
    chance = random.Random(seed)
    values = [(float(chance.randrange(5)), float(chance.randrange(5))) for _ in range(chance.randrange(1, 15))]

    def is_beaten(x: float, y: float) -> bool:
        return any(u >= x and v >= y and (u > x or v > y) for u, v in values)

    assert pareto(values) == [not is_beaten(x, y) for x, y in values]


def test_the_sweep_holds_what_the_model_has() -> None:
    plain = SimpleNamespace(draft_adapter=None, learned_sampler=None)
    rich = SimpleNamespace(draft_adapter=1, learned_sampler=SimpleNamespace(config=SimpleNamespace(block_length=16)))
    args = arguments("--block-lengths", "16,32", "--thresholds", "0.9,0.5", "--entropy-bounds", "0.1")
    names = [point.name for point in sweep(args, plain)]
    assert names == [
        "ar",
        *("diffusion confidence 16 at 0.9", "diffusion confidence 16 at 0.5"),
        *("diffusion confidence 32 at 0.9", "diffusion confidence 32 at 0.5"),
        *("diffusion entropy 16 at 0.1", "diffusion entropy 32 at 0.1"),
        *("linear_spec 16", "linear_spec 32", "quadratic_spec 16", "quadratic_spec 32"),
    ]
    more = {point.name for point in sweep(args, rich)} - set(names)
    drafts = {f"{mode} + adapter {n}" for mode in ("linear_spec", "quadratic_spec") for n in (16, 32)}
    # The sampler knows no block of 32.
    assert more == drafts | {"diffusion learned 16 at 0.9", "diffusion learned 16 at 0.5"}
    args = arguments("--modes", "linear_spec,auto,ar", "--block-lengths", "8", "--quantize", "int8")
    names = [point.name for point in sweep(args, rich)]
    assert names[:5] == ["linear_spec 8", "linear_spec + adapter 8", "auto", "auto + adapter", "ar"]
    assert names[5:] == [
        *("linear_spec int8 8", "linear_spec + adapter int8 8"),
        *("auto int8", "auto + adapter int8", "ar int8"),
    ]
    assert [point.name for point in sweep(arguments("--mode", "auto", "--adapter", "auto"), plain)] == ["auto"]


def record(point: str, task: str, number: int, tokens: int, score: float, forwards: int = 5) -> dict[str, Any]:
    return {
        "point": point, "task": task, "id": number, "num_new_tokens": tokens, "nfe": forwards, "nfe_prefill": 1,
        "seconds": forwards / 10, "accepted_lengths": [], "score": score, "parsed": "x",
    }  # fmt: skip


def test_scores_are_means_of_tasks_and_ratios_are_pooled() -> None:
    """Long are the samples that the first point answers at length; a task of more samples weighs no more."""
    points = [Point(mode="ar"), Point(mode="linear_spec", block_length=8)]
    records = [
        record("ar", "a", 0, 101, 1.0, 101), record("ar", "a", 1, 5, 1.0, 5), record("ar", "b", 0, 100, 0.0, 100),
        record("linear_spec 8", "a", 0, 99, 1.0, 11), record("linear_spec 8", "a", 1, 300, 0.0, 31),
        record("linear_spec 8", "b", 0, 300, 0.0, 31),
    ]  # fmt: skip
    result = frontier_report.build(points, records, {"a": "exact_match", "b": "exact_match"})
    ar, linear = result["groups"]["all"]
    assert (ar["score"], ar["tpf_decode"], ar["num_samples"]) == (0.5, 1.0, 3)
    assert (linear["score"], linear["scores"]) == (0.25, {"a": 0.5, "b": 0.0})
    assert linear["tpf_decode"] == (699 - 3) / (73 - 3) and linear["tpf_end_to_end"] == 699 / 73
    assert linear["seconds_per_answer"] == pytest.approx(7.3 / 3)
    assert [cell["pareto_tpf_decode"] for cell in (ar, linear)] == [True, True]
    assert [cell["pareto_seconds_per_answer"] for cell in (ar, linear)] == [True, True]
    ar, linear = result["groups"][">100 tokens"]
    assert (ar["num_samples"], linear["num_tokens"], linear["tpf_decode"]) == (1, 99, 9.8)
    assert [cell["pareto_tpf_decode"] for cell in (ar, linear)] == [False, True]
    assert [cell["pareto_seconds_per_answer"] for cell in (ar, linear)] == [False, True]
    text = frontier_report.markdown(result)
    assert "| `linear_spec 8` | 1.000 | 9.80 * |" in text and "| `ar` | 1.000 | 1.00 |" in text


def test_the_command_gives_the_figures_of_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Score, tokens and forwards of every point are those of an `eval` run with the same settings."""
    from trimode_vlm.eval.run import evaluate
    from trimode_vlm.eval.settings import EvalSettings

    plot, path = tmp_path / "frontier.png", tmp_path / "frontier.json"
    tasks = ("receipt_describe_row", "text_spell")
    argv = ["--tasks", ",".join(tasks), "--limit", "2", "--thresholds", "0.999,0.1", "--seed", "3"]
    argv += ["--entropy-bounds", "90"]
    assert cli.main(["bench", "frontier", "--quick", *argv, "--plot", str(plot), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert json.loads(path.read_text()) == document
    with Image.open(plot) as picture:
        picture.load()
        assert picture.format == "PNG" and picture.width > 1000
    result, loaded = document["frontier"], load("nano")
    cells = {cell["name"]: cell for cell in result["groups"]["all"]}
    assert set(cells) == {point["name"] for point in result["points"]} and len(cells) == 6
    for point in result["points"]:
        assert f"| `{point['name']}` |" in out
        chosen = {name: point[name] for name in ("block_length", "threshold", "entropy_bound")}
        rule = point["commit_rule"] or "confidence"
        settings = EvalSettings(
            model="nano", tasks=tasks, modes=(point["mode"],), output=str(tmp_path / point["name"].replace(" ", "_")),
            limit=2, seed=3, commit_rule=rule, **chosen,
        )  # fmt: skip
        report = evaluate(settings, loader=lambda path, **options: loaded)
        pooled, cell = report["pooled"][point["mode"]]["all"], cells[point["name"]]
        for name in ("num_samples", "num_tokens", "num_forwards", "tpf_decode", "tpf_end_to_end", "score"):
            assert cell[name] == pooled[name], (point["name"], name)
        assert cell["scores"] == {task: report["tasks"][task][point["mode"]]["score"] for task in tasks}
    assert len({cells[name]["num_forwards"] for name in cells if "confidence" in name}) == 2


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft adapter for nano."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=2, lora_alpha=64, target_modules=r"encoder\.layers.*o_proj", init_lora_weights=False)
    get_peft_model(load("nano")[0], config).save_pretrained(folder)
    return folder


def test_the_adapter_drafts_at_its_own_points_alone(adapter: Path) -> None:
    """Answers stay; the points without it are those of a model that has none."""
    args = arguments("--modes", "linear_spec", "--block-lengths", "16", "--adapter", str(adapter), "--limit", "1")
    tasks = select(["receipt_csv"])
    model, processor = load("nano", adapter=adapter)
    attached = model.draft_adapter
    points = sweep(args, model)
    without, with_it = measure({"": model}, processor, points, tasks, args)
    assert model.draft_adapter is attached
    [plain] = measure({"": load("nano")[0]}, processor, points[:1], tasks, args)
    assert without["accepted_lengths"] == plain["accepted_lengths"] != with_it["accepted_lengths"]
    assert without["ids_hash"] == plain["ids_hash"] == with_it["ids_hash"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modes", "ar,difusion"], "--modes: unknown 'difusion'; did you mean diffusion?"),
        (["--modes", ","], "--modes names no mode"),
        (["--commit-rules", "entrpy"], "--commit-rules: unknown 'entrpy'; did you mean entropy?"),
        (["--modes", "ar", "--block-lengths", "8"], "--block-lengths has no effect with --modes ar"),
        (["--modes", "ar,linear_spec", "--thresholds", "0.5"], "--thresholds has no effect with --modes ar,linear"),
        (["--commit-rules", "entropy", "--thresholds", "0.5"], "no effect with --modes ar,diffusion,linear_spec,"),
        (["--commit-rules", "confidence", "--entropy-bounds", "1"], "and --commit-rules confidence"),
        (["--commit-rules", "confidence", "--sampler", "x"], "--sampler has no effect"),
        (["--modes", "ar,diffusion", "--adapter", "auto"], "--adapter has no effect with --modes ar,diffusion"),
        (["--thresholds", "1.5"], "--thresholds takes numbers"),
        (["--block-lengths", "0"], "--block-lengths takes numbers"),
        (["--entropy-bounds", "x"], "--entropy-bounds takes numbers"),
        (["--limit", "0"], "--samples must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--tasks", "grid_jsn"], "unknown task 'grid_jsn'"),
        (["--data", "chartqa"], "--data takes TASK=PATH, found 'chartqa'"),
        (["--data", "chartqa=copy"], "--data chartqa=copy: no task here reads data"),
        (["--quantize", "int2"], "quantize must be 'int8', 'int4', '4bit' or left out, got 'int2'"),
        (["--plot", "no/such/plot.png"], "--plot no/such/plot.png: not a file in a folder"),
        (["--plot", "plot.pdf"], "--plot plot.pdf: the plot is a .png"),
        (["--json", "no/such/frontier.json"], "--json no/such/frontier.json: not a file in a folder"),
        (["--repeats", "3"], "--repeats is nothing to bench frontier: leave it out"),
        (["--device", "meta"], "--device: there is no 'meta' here"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimode_vlm.checkpoints.load", lambda *args, **options: pytest.fail("loaded"))
    assert cli.main(["bench", "frontier", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--adapter", "auto"], "nano has no draft adapter beside its weights: name its folder with --adapter"),
        (["--commit-rules", "learned"], "nano has no learned sampler beside its weights: name its folder with --sam"),
    ],
)
def test_what_was_asked_for_and_is_not_there_is_an_error(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "frontier", "--quick", *argv]) == 1
    assert words in capsys.readouterr().err


def test_options_of_frontier_are_nothing_to_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--tasks", "--plot", "--thresholds"):
        assert cli.main(["bench", "decode", option, "0.9"]) == 2
        assert f"{option} is nothing to bench decode: leave it out" in capsys.readouterr().err


def test_quick_leaves_what_was_asked_for() -> None:
    assert arguments("--quick", "--limit", "7").samples == arguments("--samples", "7").samples == 7
    assert arguments("--quick").samples == 1 and arguments().samples == 5
