"""The README is tested: its commands run, its snippets run, its file list is the tree."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import EXAMPLES, REPOSITORY

from trimode_vlm import cli, terminal_options

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FOLDERS = ("trimode_vlm", "vision", "training", "eval", "demo")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[str]:
    """All shell lines without their comments, split at `&&`."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


def trimode_commands() -> list[list[str]]:
    """The argument lists of all `trimode-vlm` commands."""
    last_in_pipe = [command.split("|")[-1].strip() for command in commands()]
    return [shlex.split(command)[1:] for command in last_in_pipe if command.startswith("trimode-vlm ")]


def listed_files() -> dict[str, str]:
    """path -> description, from the block of "What lies where"."""
    files: dict[str, str] = {}
    for line in blocks("text")[0].splitlines():
        path, _, description = line.partition("  ")
        assert path not in files, f"{path} is listed twice"
        files[path] = description.strip()
    return files


def test_file_list_is_the_tree() -> None:
    found = set()
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*"):
            relative = path.relative_to(REPOSITORY)
            if path.is_dir() or "__pycache__" in relative.parts:
                continue
            # A checkpoint's and the examples' files are one thing each.
            whole = relative.parts[:2] in (("trimode_vlm", "nano"), ("trimode_vlm", "examples"))
            found.add("/".join(relative.parts[:2]) + "/" if whole else str(relative))
    found |= {path.name for path in REPOSITORY.iterdir() if path.is_file() and not path.name.startswith(".git")}
    found |= {"tests/", ".ci/run"}
    files = listed_files()
    assert sorted(found - set(files)) == [], "not in the README"
    assert sorted(set(files) - found) == [], "in the README, but not there"
    assert all(files.values()), "every file needs a description"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), f"README links to {target}, which is not there"


def test_every_command_would_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trimode_commands()
    assert {argv[0] for argv in found} == set(cli.COMMANDS)
    for name, *argv in found:
        if name == "train":
            from trimode_vlm.training.cli import FLAGS, read_settings
            from trimode_vlm.training.settings import parse_overrides

            read_settings(parse_overrides([arg for arg in argv if arg not in FLAGS]))
            continue
        if name == "inspect":
            from trimode_vlm.training.inspect import read_options

            read_options(argv)
            continue
        module: Any = __import__(cli.COMMANDS[name][0], fromlist=["add_arguments"])
        parser = cli.Parser(prog=name)
        module.add_arguments(parser)
        parser.add_config_option()
        args = parser.parse(argv)
        if name == "chat":
            monkeypatch.chdir(REPOSITORY)
            terminal_options.check(
                args, tuple(terminal_options.MODE_OPTIONS) if args.compare else (args.mode or "linear_spec",)
            )


def test_ci_runs_the_test_command() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    install, test = next(block for block in blocks("sh") if "[test]" in block).strip().split(" && ")
    assert install.removeprefix("pip install ") in script and test in script


def test_first_command_gives_the_right_answer_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    argv = next(argv for argv in trimode_commands() if "--compare" in argv)
    image, question = Path(argv[argv.index("--image") + 1]), argv[-1]
    entries = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    answer = next(e["answer"] for e in entries if e["image"] == image.name and e["question"] == question)
    assert cli.main([*argv[:-3], "--image", str(REPOSITORY / image), question]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ar:\n{answer}\n")
    assert all(f"{mode}: the same text" in out for mode in ("diffusion", "linear_spec", "quadratic_spec", "auto"))
    table = out[out.index("mode  ") :].splitlines()
    assert [line.split()[-1] for line in table[3:]] == ["yes"] * 4


def test_python_snippet_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ tokens in \d+ forwards, TPF \d+\.\d", done.stdout)


def test_loading_snippet_uses_real_arguments() -> None:
    import trimode_vlm

    names = re.findall(r"(\w+)=", blocks("python")[1])
    assert names and set(names) <= set(inspect.signature(trimode_vlm.load).parameters)


def test_nano_table_is_measured() -> None:
    table = re.search(r"<!-- nano-table -->\n(.*?)<!-- /nano-table -->", README, flags=re.S)
    assert table and "Not measured yet" not in table[1] and re.search(r"\|.*0?\.\d", table[1])
