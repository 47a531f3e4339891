"""The package as users get it: what the wheel holds, from where it imports, what the import costs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
OUTER = ("vision", "training", "eval", "demo")
# Costs seconds or is optional; everything that needs one of these imports it where it is used.
HEAVY = ("peft", "timm", "datasets", "deepspeed", "gradio", "matplotlib", "tensorboard", "rapidfuzz")


def package_folders() -> set[str]:
    """Import names of all folders with modules, as they lie on disk."""
    inner = {".".join(path.parent.relative_to(REPOSITORY).parts) for path in (REPOSITORY / "trimode_vlm").rglob("*.py")}
    return inner | {f"trimode_vlm.{name}" for name in OUTER if list((REPOSITORY / name).glob("*.py"))}


def run_python(code: str, cwd: Path, *paths: Path) -> str:
    """stdout of `code` in a fresh interpreter that finds packages in `paths` first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from a copy so that no build folder is left in the checkout."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("trimode_vlm", *OUTER):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", root, source]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (archive,) = root.glob("*.whl")
    unpacked = root / "unpacked"
    zipfile.ZipFile(archive).extractall(unpacked)
    return unpacked


def test_package_list_matches_the_folders() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == package_folders()


def test_wheel_holds_every_file_and_only_our_package(wheel: Path) -> None:
    tops = {path.name for path in wheel.iterdir()}
    assert tops == {"trimode_vlm", next(top for top in tops if top.endswith(".dist-info"))}
    expected = set()
    for folder in ("trimode_vlm", *OUTER):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                relative = path.relative_to(REPOSITORY)
                expected.add(relative if folder == "trimode_vlm" else Path("trimode_vlm") / relative)
    assert {path.relative_to(wheel) for path in (wheel / "trimode_vlm").rglob("*") if path.is_file()} == expected
    (info,) = wheel.glob("*.dist-info")
    assert {"LICENSE", "NOTICE"} <= {path.name for path in info.rglob("*")}


@pytest.mark.parametrize("place", ["wheel", "checkout"])
def test_all_folders_import_under_one_name(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue("wheel") if place == "wheel" else REPOSITORY
    names = sorted(package_folders())
    code = f"import importlib\nfor name in {names!r}: print(importlib.import_module(name).__file__)"
    files = run_python(code, tmp_path, root).split()
    assert len(files) == len(names) and all(Path(file).is_relative_to(root) for file in files)


def test_import_registers_auto_classes_and_stays_light(tmp_path: Path) -> None:
    code = f"""
import sys, trimode_vlm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
config = AutoConfig.for_model("nemotron_labs_diffusion_vlm")
assert AutoModelForImageTextToText._model_mapping[type(config)] is trimode_vlm.TriModeVLM
assert PROCESSOR_MAPPING[type(config)] is trimode_vlm.TriModeProcessor
text = AutoConfig.for_model("nemotron_labs_diffusion")
assert issubclass(AutoModelForCausalLM._model_mapping[type(text)], trimode_vlm.TriModeVLM)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run_python(code, tmp_path, REPOSITORY).strip() == "[]"


def test_public_names() -> None:
    import trimode_vlm

    for name in trimode_vlm.__all__:
        assert getattr(trimode_vlm, name).__name__ == name
    assert set(trimode_vlm.__all__) <= set(dir(trimode_vlm))
    with pytest.raises(AttributeError, match="no attribute 'TriModel'"):
        _ = trimode_vlm.TriModel


def test_command_answers_before_it_pays_for_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trimode_vlm", "chat", "--mode", "difusion", "Hello?"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "did you mean diffusion?" in done.stderr
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    # -X importtime leaves out the module that importlib.import_module names, but not what that one imports.
    assert "trimode_vlm.compare" in imported and not imported & {"torch", "transformers", "numpy"}


def test_version_ranges_hold_what_is_installed() -> None:
    groups = [PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"].values()]
    checked = 0
    for requirement in map(Requirement, sum(groups, [])):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not requirement.extras:
            assert requirement.specifier.contains(version), f"{requirement} does not admit the installed {version}"
            checked += 1
    assert checked >= len(PYPROJECT["project"]["dependencies"])


def test_no_module_imports_a_folder_by_its_own_name() -> None:
    banned = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(OUTER)
