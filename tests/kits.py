"""Functions of the public evaluation kits as oracles, and generated answers to compare ours with them."""

from __future__ import annotations

import ast
import collections
import copy
import importlib
import importlib.util
import os
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


def imported(name: str) -> ModuleType:
    """A module of lmms-eval or lm-eval; the test skips with the reason where it cannot be imported."""
    # A judge's client is made on import and wants a key, which it never uses here.
    os.environ.setdefault("OPENAI_API_KEY", "unused")
    try:
        return importlib.import_module(name)
    except (ImportError, AssertionError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def vlmevalkit(path: str, *functions: str, **names: Any) -> SimpleNamespace:
    """Functions or methods of one of VLMEvalKit's files, without the imports of its packages.

    Args:
        path: inside the package `vlmeval`.
        functions: which ones; they find each other.
        names: what they find instead of the file's imports.
    """
    spec = importlib.util.find_spec("vlmeval")
    if spec is None or spec.origin is None:
        pytest.skip("VLMEvalKit (ms-vlmeval) is not installed")
    tree = ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions}
    for node in [inner for function in found.values() for inner in ast.walk(function)]:
        # Annotations name what is not imported here.
        if isinstance(node, ast.FunctionDef):
            node.returns, node.decorator_list = None, []
        elif isinstance(node, ast.arg):
            node.annotation = None
    namespace: dict[str, Any] = dict(names)
    exec(compile(ast.Module(body=[found[name] for name in functions], type_ignores=[]), path, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in functions})


CASES = 600

CHOICES = ["a red car", "blue bus", "green van", "none"]
FRAMES = (
    "{}", "{}.", "({})", " {} ", "**{}**", "The answer is {}", "The answer is {}.", "Answer: {}", "answer is ({})",
    "The answer is B, not {} or B", "The answer is D or {} or D",
    "{} because it fits", "I think {} or {}", "Not {}, but {}.", "{}: as shown", "{}) as shown", "{},{}", "'{}'",
    "[{}]",
    "the correct option is {} and so on", "{}\n{}", "It could be {} so it is {}", "Sorry. {} = {}", "{}{}", "x {} y",
    "After looking at all of it for a long time the picture shows {}", "답: {}", "I choose {}!", "Final answer: {}\n",
)  # fmt: skip
FILLERS = (
    *"ABCDABCDABCDABCDEZabd", *CHOICES, *CHOICES, "Yes", "no", "YES.", "not", "8", "8.0", "-3", "1,234", "1234",
    "12%", "0.12", "3.5e2", "2015",
    "ten", "one", "it's", "dont", "a", "", "x-y", "ﬀ", "ß", "Cannot determine the answer", "A red car", "1,000.50",
    "$5",
)  # fmt: skip


VQA_EVAL = "dataset/utils/vqa_eval.py"
HELPERS = {
    "np": np,
    "os": os,
    "cp": copy,
    "string": string,
    "defaultdict": collections.defaultdict,
    "istype": isinstance,
    "listinstr": lambda names, name: name in names,
}


def matching() -> SimpleNamespace:
    return vlmevalkit("utils/matching_util.py", "can_infer", "can_infer_option", "can_infer_text", **HELPERS)


def answers(seed: int, more: tuple[str, ...] = ()) -> Iterator[str]:
    """CASES texts, from a bare letter to a sentence that names several things."""
    generator = random.Random(seed)
    for _ in range(CASES):
        frame = generator.choice(FRAMES)
        yield frame.format(*generator.choices(FILLERS + more, k=frame.count("{}")))


def draw(seed: int, values: tuple[Any, ...]) -> Iterator[Any]:
    generator = random.Random(seed)
    while True:
        yield generator.choice(values)


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], cases: Iterator[tuple[Any, ...]]) -> list[Any]:
    """The cases in which two functions differ; at least 300 were tried, with more than one result."""
    tried, different, results = 0, [], Counter()
    for case in cases:
        mine, its = ours(*case), theirs(*case)
        tried += 1
        results[mine] += 1
        if mine != its:
            different.append((case, mine, its))
    assert tried >= 300 and len(results) > 1 and results.most_common(2)[-1][1] >= 10, results
    return different
