"""The table of benchmarks, and the groups that name several of them."""

from __future__ import annotations

from trimode_vlm.eval import benchmarks_choice, benchmarks_text, benchmarks_vqa
from trimode_vlm.eval.declarations import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for module in (benchmarks_choice, benchmarks_vqa, benchmarks_text)
    for benchmark in module.BENCHMARKS
}
GROUPS: dict[str, list[str]] = {
    # The eight of the paper's table, in its order.
    "paper": ["ai2d", "chartqa", "docvqa", "mmmu", "mmmu_pro", "mmmu_pro_vision", "mathvista", "realworldqa"],
    "vlm": [benchmark.name for module in (benchmarks_choice, benchmarks_vqa) for benchmark in module.BENCHMARKS],
    "text": [benchmark.name for benchmark in benchmarks_text.BENCHMARKS],
}
