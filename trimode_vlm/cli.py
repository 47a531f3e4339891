"""The `trimode-vlm` command: find the command, read its options, say an error in one line.

A command is a module with `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`. Nothing here imports torch,
so that a mistyped option answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

COMMANDS = {
    "chat": ("trimode_vlm.terminal", "ask a model about pictures: one question, a conversation, or all modes compared"),
    "demo": ("trimode_vlm.demo.web", "a web chat: pictures, all modes side by side, tokens per forward as it happens"),
    "serve": ("trimode_vlm.demo.serve", "an OpenAI-compatible server, with the web chat beside it if asked"),
    "convert": ("trimode_vlm.convert", "write a checkpoint in another layout"),
    "train": ("trimode_vlm.training.cli", "train a model from a recipe or a YAML file"),
    "inspect": ("trimode_vlm.training.inspect", "show a training sample as the model will see it"),
    "eval": ("trimode_vlm.eval.run", "score a model on tasks, in every mode"),
    "bench": ("trimode_vlm.eval.bench", "measure decoding beside its ceiling and transformers, and a training step"),
    "sol": ("trimode_vlm.eval.sol", "how few steps diffusion could take: an oracle, beside the real samplers"),
}

# Kept here too so that a wrong one is refused before torch is imported. A test compares them with the library's.
DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT_DTYPES = ("bf16", "fp32", "fp16", "half", "float")
# Characters of a text that the settings line shows.
MAX_SHOWN = 200

HELP = """usage: trimode-vlm COMMAND [options]

commands:
{commands}

  trimode-vlm --version prints the version

options, for every command:
  --help         what the command does, its options, examples
  --config FILE  read options from a YAML file; the command line overrides it
  --debug        show the traceback of an error

examples:
  trimode-vlm chat --image receipt.png "What is the total?"
  trimode-vlm chat --compare --image receipt.png "Write the receipt as JSON."
  trimode-vlm eval --help
"""


class UsageError(ValueError):
    """The command line is wrong: exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that name the nearest option, and `--config FILE`."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **kwargs}
        super().__init__(**kwargs)
        self.reads_config = False

    def add_config_option(self) -> None:
        """Take `--config FILE`, unless the command has a `--config` of its own."""
        if "--config" not in self._option_string_actions:
            self.add_argument("--config", metavar="FILE", help="YAML file of options; the command line overrides")
            self.reads_config = True

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; `--top_p` reads as `--top-p`, and the options of `--config` stand before those of the line.

        Raises:
            UsageError: an unknown option or a bad value, on the line or in the file.
        """
        argv = [self._with_dashes(arg) for arg in argv]
        path = _value_of("--config", argv) if self.reads_config else None
        args, extra = self.parse_known_args([*(self._read_config(path) if path else []), *argv])
        if extra and extra[0].startswith("-"):
            name = extra[0].split("=")[0]
            raise UsageError(f"unknown option {name}{nearest(name, self._option_string_actions)}")
        if extra:
            raise UsageError(f"unexpected argument {extra[0]!r} (put quotes around a text with spaces)")
        return args

    def _with_dashes(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        dashed = "--" + name[2:].replace("_", "-")
        known = name.startswith("--") and dashed in self._option_string_actions
        return dashed + equals + value if known else arg

    def _read_config(self, path: str) -> list[str]:
        """A YAML mapping of options as the arguments that say the same."""
        import yaml

        try:
            settings = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
        except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8, dates that are none
            raise UsageError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(settings, dict):
            raise UsageError(f"--config {path} must hold 'option: value' lines, found a {type(settings).__name__}")
        options = {name: action for name, action in self._option_string_actions.items() if name.startswith("--")}
        argv: list[str] = []
        for key, value in settings.items():
            name = "--" + str(key).replace("_", "-")
            if name not in options or name in ("--config", "--help"):
                raise UsageError(f"--config {path}: unknown option {key!r}{nearest(name, options, strip='-')}")
            values = value if isinstance(value, list) else [value]
            if None in values:
                raise UsageError(f"--config {path}: {key} has no value; give one or leave it out")
            if options[name].nargs == 0:
                if not isinstance(value, bool):
                    raise UsageError(f"--config {path}: {key} must be true or false, found {value!r}")
                argv += [name] if value else []
            else:
                argv += [f"{name}={item}" for item in values]
        return argv


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    """The last value given for an option, found before the whole line is parsed."""
    values = [arg.partition("=")[2] for arg in argv if arg.startswith(option + "=")]
    values += [value for arg, value in zip(argv, argv[1:], strict=False) if arg == option]
    return values[-1] if values else None


def nearest(name: str, known: Iterable[str], strip: str = "") -> str:
    """ "; did you mean X?" with the nearest of `known`, or nothing when none is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0].lstrip(strip)}?" if found else ""


# Characters of an error that a terminal still shows as something to read.
LONGEST_ERROR = 600


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; errors that are not addressed to the user also say their type."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    if len(text) > LONGEST_ERROR:
        return f"{text[:LONGEST_ERROR]}... (--debug shows all)"
    addressed = isinstance(error, (ValueError, OSError, RuntimeError, ImportError))
    return text if addressed else f"{type(error).__name__}: {text} (--debug shows where)"


def print_settings(settings: dict[str, Any]) -> None:
    """One JSON line on stderr, so that stdout holds the result alone; long texts are cut."""
    short = {name: _shortened(value) for name, value in settings.items()}
    print(f"settings: {json.dumps(short, ensure_ascii=False, default=str)}", file=sys.stderr)


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    is_long = isinstance(value, str) and len(value) > MAX_SHOWN
    return f"{value[:MAX_SHOWN]}... ({len(value)} characters)" if is_long else value


def check_dtype(name: str | None) -> None:
    """Raise UsageError for a --dtype that weights cannot have."""
    if name is not None and name.removeprefix("torch.") not in (*DTYPES, *SHORT_DTYPES):
        raise UsageError(f"--dtype: unknown dtype {name!r}{nearest(name, DTYPES)} (known: {', '.join(DTYPES)})")


def check_device(name: str | None) -> None:
    """Raise UsageError for a --device that this machine does not have; a name makes this import torch."""
    if name is None:
        return
    import torch

    usable = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        usable += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in usable:
        raise UsageError(f"--device: there is no {name!r} here{nearest(name, usable)} (usable: {', '.join(usable)})")


def dispatch(argv: Sequence[str], debug: bool = False) -> int:
    """Run the command that `argv` names; returns its exit code.

    Raises:
        UsageError: no such command, or options that it does not take.
    """
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h", "help"):
        print(HELP.format(commands="\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())))
        return 0 if argv else 2
    if name in ("--version", "-V"):
        from trimode_vlm import __version__

        print(f"trimode-vlm {__version__}")
        return 0
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)} (known: {', '.join(COMMANDS)})")
    module_name, description = COMMANDS[name]
    module = importlib.import_module(module_name)
    # The options of these two are a recipe's settings, nested, which only the recipe knows.
    if name == "train":
        return module.train([*argv[1:], *(["--debug"] if debug else [])])
    if name == "inspect":
        return module.inspect(list(argv[1:]))
    parser = Parser(prog=f"trimode-vlm {name}", description=description, epilog=module.EXAMPLES)
    module.add_arguments(parser)
    parser.add_config_option()
    return module.run(parser.parse(argv[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    # DeepSpeed's launcher puts its --local_rank=N first; it sets LOCAL_RANK as well.
    argv = [arg for arg in argv if arg != "--debug" and not arg.startswith("--local_rank=")]
    command = " ".join(["trimode-vlm", *argv[:1]]) if argv and argv[0] in COMMANDS else "trimode-vlm"

    def show_warning(message: Warning | str, *place: Any, **options: Any) -> None:
        print(f"{command}: warning: {' '.join(str(message).split())}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = show_warning
            return dispatch(argv, debug)
    except UsageError as error:
        print(f"{command}: {one_line(error)}  ({command} --help)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"{command}: error: {one_line(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Run as a file, this is not the module that the commands import: they raise the other one's UsageError.
    from trimode_vlm.cli import main as run_command

    sys.exit(run_command())
