"""Every benchmark through the runner, on nano, in three modes: from the files of its schema to the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from benchmark_fixtures import FIXTURES
from test_benchmarks import copies  # noqa: F401
from test_own_tasks import written

from trimode_vlm.eval.run import EvalSettings, evaluate

MODES = ("ar", "diffusion", "linear_spec")
NUM_TOKENS = 6
LIMIT = 2


@pytest.fixture(scope="module")
def run(copies: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:  # noqa: F811
    """The report and the records of two samples of all benchmarks and of an own task."""
    pytest.importorskip("math_verify")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    settings = EvalSettings(
        model="nano",
        tasks=(*FIXTURES, str(written(folder))),
        modes=MODES,
        output=str(folder / "out"),
        limit=LIMIT,
        batch_size=2,
        max_new_tokens=NUM_TOKENS,
        data=copies,
    )
    report = evaluate(settings)
    lines = (folder / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return report, [json.loads(line) for line in lines]


def test_every_benchmark_runs_in_three_modes(run: tuple[dict[str, Any], list[Any]]) -> None:
    report, records = run
    found = {(r["task"], r["mode"], r["id"]) for r in records}
    wanted = {(task, mode, i) for task in (*FIXTURES, "mine") for mode in MODES for i in range(LIMIT)}
    assert found == wanted and len(records) == len(wanted)
    for record in records:
        assert 0 < record["num_new_tokens"] <= NUM_TOKENS and 0 <= record["score"] <= 1
        if record["task"] != "mine":
            assert record["category"] == FIXTURES[record["task"]].categories[record["id"]]
    # Self-speculation answers as AR does, whatever the benchmark.
    answers = {mode: {(r["task"], r["id"]): r["prediction"] for r in records if r["mode"] == mode} for mode in MODES}
    assert answers["linear_spec"] == answers["ar"]
    assert json.loads(json.dumps(report))


def test_the_report_has_a_cell_for_each(run: tuple[dict[str, Any], list[Any]]) -> None:
    report, records = run
    assert list(report["tasks"]) == [*FIXTURES, "mine"]
    for task, cells in report["tasks"].items():
        assert list(cells) == list(MODES)
        for mode, cell in cells.items():
            found = [r for r in records if (r["task"], r["mode"]) == (task, mode)]
            assert cell["num_samples"] == LIMIT
            wanted = {r["category"] for r in found} - {None}
            assert set(cell["categories"]) == wanted
