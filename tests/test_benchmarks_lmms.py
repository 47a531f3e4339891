"""Prompts and sources of the fifteen benchmarks beside those of lmms-eval's task files; differences are listed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmark_fixtures import FIXTURES

from trimode_vlm.eval.benchmarks import BENCHMARKS, GROUPS
from trimode_vlm.eval.sources import RENAMED

lmms_eval = pytest.importorskip("lmms_eval", reason="lmms-eval is not installed (pip install 'trimode-vlm[test]')")
ROOT = Path(lmms_eval.__file__).parent / "tasks"
FILES = {
    "ai2d": "ai2d/ai2d",
    "chartqa": "chartqa/chartqa",
    "docvqa": "docvqa/docvqa_val",
    "infovqa": "infovqa/infovqa_val",
    "mmmu": "mmmu/mmmu_val",
    "mmmu_pro": "mmmu_pro/mmmu_pro_standard",
    "mmmu_pro_vision": "mmmu_pro/mmmu_pro_vision_cot",
    "mathvista": "mathvista/mathvista_testmini_format",
    "realworldqa": "realworldqa/realworldqa",
    "ocrbench": "ocrbench/ocrbench",
    "textvqa": "textvqa/textvqa_val",
    "mmstar": "mmstar/mmstar",
    "scienceqa": "scienceqa/scienceqa_img",
    "pope": "pope/pope",
    "mme": "mme/mme",
}
SHORT = "\nAnswer the question using a single word or phrase."
# What lmms-eval makes of our text, where it is not the same. evaluation.md is what we follow.
DIFFERENCES: dict[str, Callable[[str], str]] = {
    # A blank line before the instruction.
    "mmmu": lambda text: text.replace("\nAnswer ", "\n\nAnswer "),
    "mmmu_pro": lambda text: text.replace("\nAnswer with the option's letter", "\n\nAnswer with the option letter"),
    # No full stop at the end.
    "mmstar": lambda text: text.removesuffix("."),
    # The question is written like a name: first letter large, all others small.
    "textvqa": lambda text: text.removesuffix(SHORT).capitalize() + SHORT,
    # The data's own request for yes or no makes way for another.
    "mme": lambda text: text.replace(" Please answer yes or no.", "") + SHORT,
}
# lmms-eval writes MathVista's query anew, from question and choices, in three wordings; ours is the data's `query`.
OWN_QUERY = "mathvista"


def task_file(path: Path) -> dict[str, Any]:
    """A task's YAML; functions become (folder, "module.function")."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: (path.parent.name, loader.construct_scalar(node)))
    task = yaml.load(path.read_text(encoding="utf-8"), Loader)
    return task_file(path.parent / task.pop("include")) | task if "include" in task else task


def prompt(task: dict[str, Any], row: dict[str, Any]) -> str:
    if isinstance(task["doc_to_text"], str):
        return task["doc_to_text"]
    folder, (module, function) = task["doc_to_text"][0], task["doc_to_text"][1].split(".")
    doc_to_text = getattr(importlib.import_module(f"lmms_eval.tasks.{folder}.{module}"), function)
    options = task.get("lmms_eval_specific_kwargs", {}).get("default", {})
    return doc_to_text(row, options)


def test_all_are_compared() -> None:
    assert set(FILES) == set(GROUPS["vlm"]) and set(DIFFERENCES) < set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_sources_are_theirs(name: str) -> None:
    task, source = task_file(ROOT / f"{FILES[name]}.yaml"), BENCHMARKS[name].source
    names = {source.path} | {source.path.replace(old, new) for old, new in RENAMED.items()}
    assert task["dataset_path"] in names
    assert (task.get("dataset_name"), task["test_split"]) == (source.config, source.split)


@pytest.mark.parametrize("name", [name for name in FILES if name != OWN_QUERY])
def test_prompts_are_theirs(name: str) -> None:
    task = task_file(ROOT / f"{FILES[name]}.yaml")
    for row in FIXTURES[name].rows:
        ours = BENCHMARKS[name].prompt(row)
        assert prompt(task, row) == DIFFERENCES.get(name, str)(ours)
        assert name not in DIFFERENCES or DIFFERENCES[name](ours) != ours, "no longer different"
