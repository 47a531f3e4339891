"""Functions of the public evaluation kits, as oracles: imported where that is cheap, else cut out of their source."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def imported(name: str) -> ModuleType:
    """A module of lmms-eval or lm-eval; the test skips with the reason where it cannot be imported."""
    # A judge's client is made on import and wants a key, which it never uses here.
    os.environ.setdefault("OPENAI_API_KEY", "unused")
    try:
        return importlib.import_module(name)
    except (ImportError, AssertionError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def vlmevalkit(path: str, **names: Any) -> SimpleNamespace:
    """All functions of one of VLMEvalKit's files, methods included, without the imports of its packages.

    Args:
        path: inside the package `vlmeval`.
        names: what the functions find instead of the file's imports.
    """
    spec = importlib.util.find_spec("vlmeval")
    if spec is None or spec.origin is None:
        pytest.skip("VLMEvalKit (ms-vlmeval) is not installed")
    tree = ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.decorator_list = []
        function.returns = None
        for argument in function.args.args:
            argument.annotation = None
        # Inner functions lose their annotations too: what they name is not imported.
    annotated = [node for node in ast.walk(tree) if isinstance(node, ast.arg)]
    for node in annotated:
        node.annotation = None
    methods = [m for node in tree.body if isinstance(node, ast.ClassDef) for m in node.body]
    kept = [node for node in [*tree.body, *methods] if isinstance(node, ast.FunctionDef)]
    namespace: dict[str, Any] = dict(names)
    exec(compile(ast.Module(body=kept, type_ignores=[]), path, "exec"), namespace)  # noqa: S102
    return SimpleNamespace(**namespace)
