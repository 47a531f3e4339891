"""The command: what it refuses and how fast, one-shot answers, conversations, the comparison of modes."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from PIL import Image

from trimode_vlm import cli, terminal, terminal_options
from trimode_vlm.decoders import MODE_OPTIONS
from trimode_vlm.eval import bench_decode
from trimode_vlm.terminal_chat import Conversation, read_lines, talk


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "red.png"
    Image.new("RGB", (60, 40), "red").save(path)
    return str(path)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, chat_model: Any, processor: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `trimode-vlm chat ARGS` with the tiny model; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(terminal, "load_model", lambda args: (chat_model, processor))

    def call(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = cli.main(["chat", "--max-new-tokens", "12", *argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that must fail before a model is loaded; returns (exit code, its one line)."""

    def loads(args: Any) -> Any:
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(terminal, "load_model", loads)

    def call(*argv: str) -> tuple[int, str]:
        code = cli.main(list(argv))
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("settings: ")]
        assert out == "" and len(lines) == 1, (out, err)
        return code, lines[0]

    return call


def giant_png(path: Path, side: int = 30000) -> str:
    """A file of some 60 bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return str(path)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chta"], "unknown command 'chta'; did you mean chat?"),
        (["publish"], f"known: {', '.join(cli.COMMANDS)}"),
        (["chat", "--treshold", "0.9", "Hi"], "unknown option --treshold; did you mean --threshold?"),
        (["chat", "--mode", "difusion", "Hi"], "unknown mode 'difusion'; did you mean diffusion?"),
        (["chat", "--mode", "ar", "--threshold", "0.9", "Hi"], "--threshold has no effect with --mode ar"),
        (["chat", "--mode", "ar", "--commit-rule", "entropy", "Hi"], "it belongs to diffusion"),
        (["chat", "--entropy-bound", "0.1", "Hi"], "--entropy-bound has no effect with --mode linear_spec"),
        (["chat", "--mode", "diffusion", "--entropy-bound", "0.1", "Hi"], "without --commit-rule entropy"),
        (["chat", "--compare", "--commit-rule", "entropy", "--threshold", "0.5", "Hi"], "its bound is --entropy-bound"),
        (["chat", "--mode", "diffusion", "--commit-rule", "entropi", "Hi"], "unknown 'entropi'; did you mean entropy?"),
        (
            ["chat", "--mode", "diffusion", "--commit-rule", "entropy", "--entropy-bound", "-1", "Hi"],
            "must be 0 or more",
        ),
        (["chat", "--mode", "diffusion", "--sampler", "x", "Hi"], "--sampler has no effect without --commit-rule"),
        (["chat", "--mode", "diffusion", "--commit-rule", "learned", "--temperature", "1", "Hi"], "learned is greedy"),
        (["chat", "--mode", "diffusion", "--adapter", "auto", "Hi"], "it belongs to linear_spec, quadratic_spec, auto"),
        (["chat", "--quantize", "int3", "Hi"], "--quantize: unknown 'int3'; did you mean int"),
        (["chat", "--mode", "linear_spec", "--threshold", "0.9", "Hi"], "it belongs to diffusion"),
        (["chat", "--mode", "linear_spec", "--verifier-mix", "0.9", "Hi"], "it belongs to quadratic_spec"),
        (["chat", "--mode", "quadratic_spec", "--verifier-mix", "0", "Hi"], "--verifier-mix must be above 0"),
        (["chat", "--mode", "ar", "--block_length", "8", "Hi"], "--block-length has no effect"),
        (["chat", "--top-p", "0.9", "Hi"], "--top-p has no effect without --temperature"),
        (["chat", "--temperature", "-1", "Hi"], "--temperature must be 0 or more"),
        (["chat", "--temperature", "nan", "Hi"], "--temperature must be 0 or more, and finite"),
        (["chat", "--temperature", "inf", "Hi"], "--temperature must be 0 or more, and finite"),
        (["chat", "--temperature", "1", "--top-p", "0", "Hi"], "--top-p must be above 0 and at most 1, found 0.0"),
        (["chat", "--temperature", "1", "--top-p", "nan", "Hi"], "--top-p must be above 0 and at most 1, found nan"),
        (["chat", "--temperature", "1", "--top-k", "-1", "Hi"], "--top-k must be 0 or more, found -1"),
        (["chat", "--mode", "diffusion", "--threshold", "1.5", "Hi"], "--threshold must be above 0 and at most 1"),
        (["chat", "--mode", "diffusion", "--threshold", "nan", "Hi"], "--threshold must be above 0 and at most 1"),
        (["chat", "--block-length", "0", "Hi"], "--block-length must be at least 1, found 0"),
        (["chat", "--block-length", "many", "Hi"], "must be a number of tokens or auto, found 'many'"),
        (["chat", "--mode", "diffusion", "--block-length", "auto", "Hi"], "it belongs to linear_spec, auto"),
        (["chat", "--verification", "block", "Hi"], "--verification has no effect without --temperature"),
        (["chat", "--verification", "blok", "--temperature", "1", "Hi"], "unknown 'blok'; did you mean block?"),
        (["chat", "--block-length", "1025", "Hi"], "--block-length must be at most 1024, found 1025"),
        (["chat", "--dtype", "bfloat61", "Hi"], "unknown dtype 'bfloat61'; did you mean bfloat16?"),
        (["chat", "--seed", "5", "Hi"], "--seed has no effect without --temperature"),
        (["chat", "--image", "https://a.org/a.png", "Hi"], "remote images are not read; download it first"),
        (["chat", "--image", "file:///no/such.png", "Hi"], "file:///no/such.png: no such file"),
        (["chat", "--image", "", "Hi"], "--image: the path is empty"),
        (["chat", "--image", "tests", "Hi"], "--image tests: this is a folder"),
        (["convert", "nano", "out/nano", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["chat", "--device", "cdua", "Hi"], "--device: there is no 'cdua' here"),
        (["chat", "--device", "cuda:99", "Hi"], "there is no 'cuda:99' here"),
        (["eval", "--device", "meta", "--output", "no/such"], "--device: there is no 'meta' here"),
        (["chat", "--max-new-tokens", "0", "Hi"], "--max-new-tokens must be at least 1"),
        (["chat", "--max-new-tokens", "many", "Hi"], "invalid int value: 'many'"),
        (["chat", "--compare"], "--compare needs a question"),
        (["chat", "--compare", "--mode", "ar", "Hi"], "leave --mode out"),
        (["chat", "  "], "the question is empty"),
        (["chat", "What", "is", "this?"], "unexpected argument 'is'"),
        (["chat", "--image", "no/such.png", "Hi"], "no/such.png: no such file"),
        (["chat", "--config", "no/such.yaml"], "cannot read --config no/such.yaml: No such file or directory"),
        (["convert", "nano", "out/nano", "--to", "ministral"], "unknown layout 'ministral'; did you mean ministral3?"),
        (["convert", "nano", "tests"], "tests is there already"),
        (["bench", "encode"], "invalid choice: 'encode'"),
        (["bench", "decode", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["bench", "decode", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "decode", "--threads", "0"], "--threads must be at least 1"),
        (["bench", "decode", "--max-new-tokens", "-1", "--quick"], "--max-new-tokens must be at least 1"),
        (["bench", "decode", "--new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["bench", "decode", "--limit", "0"], "--samples must be at least 1, got 0"),
        (["bench", "decode", "--json", "no/such/decode.json"], "--json no/such/decode.json: not a file in a folder"),
        (["bench", "decode", "--dtype", "int3"], "--dtype: unknown dtype 'int3'"),
        (["bench", "train", "--quantize", "int8"], "--quantize is nothing to bench train: leave it out"),
        (["bench", "train", "--adapter", "auto"], "--adapter is nothing to bench train: leave it out"),
        (["bench", "decode", "--json", "tests"], "--json tests: not a file in a folder"),
        (["eval", "--model", "nano"], "required: --output"),
        (["inspect", "--config", "nano"], "--index is missing"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(refuse: Any, argv: list[str], words: str) -> None:
    code, line = refuse(*argv)
    assert code == 2 and words in line and line.endswith("--help)")


def test_bad_pictures_are_one_line_that_names_the_file(refuse: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("this is no picture")
    empty = tmp_path / "empty.png"
    empty.touch()
    for path in (str(text), str(empty), giant_png(tmp_path / "giant.png")):
        code, line = refuse("chat", "--image", path, "Hi")
        assert code == 1 and Path(path).name in line
    assert "pixels" in line


def test_no_model_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--model", "no/such/folder", "Hi"]) == 1
    assert "no/such/folder" in capsys.readouterr().err.splitlines()[-1]


def test_prompt_beyond_the_positions(chat: Any, chat_model: Any) -> None:
    code, out, err = chat("word " * 2 * chat_model.config.max_position_embeddings)
    settings, error = err.splitlines()
    assert code == 1 and out == "" and "1024 positions" in error
    assert settings.startswith("settings: ") and len(settings) < 1000 and "(10240 characters)" in settings


def test_a_wrong_value_is_refused_before_torch_is_imported() -> None:
    script = """if True:
        import sys
        sys.argv[:] = ["/usr/bin/trimode-vlm"]
        from trimode_vlm import cli
        assert cli.main(["chat", "--dtype", "int8", "Hi"]) == 2
        assert cli.main(["chat", "--mode", "diffusion", "--threshold", "2", "Hi"]) == 2
        assert cli.main(["convert", "nano", "out", "--dtype", "int8"]) == 2
        assert cli.main(["inspect", "--config", "nano", "--index", "first"]) == 2
        # bench sets OMP_NUM_THREADS, which torch reads when it loads.
        assert cli.main(["bench", "decode", "--samples", "0"]) == 2
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, timeout=300)


def started_as(*argv: str) -> str:
    """What a process that was started so prints, and its exit code."""
    done = subprocess.run([sys.executable, *argv], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    return f"{done.returncode} {done.stdout}{done.stderr}".strip()


def test_every_way_to_start_the_command_agrees(tmp_path: Path) -> None:
    """Exit codes and lines of `python -m trimode_vlm`, of the module and of the script; only the first and last know
    before torch is imported that they are the command."""
    script = tmp_path / "trimode-vlm"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from trimode_vlm.cli import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    )
    wrong = ("chat", "--compare")
    line = "2 trimode-vlm chat: --compare needs a question"
    assert started_as("-m", "trimode_vlm", *wrong).startswith(line)
    assert started_as("-m", "trimode_vlm.cli", *wrong).startswith(line)
    assert started_as(str(script), *wrong).startswith("2 False")


@pytest.mark.parametrize("argv", [("-c", "CODE"), ("-c", "CODE", "-m", "trimode_vlm"), ("FILE", "-m", "trimode_vlm")])
def test_other_programs_get_the_auto_classes(tmp_path: Path, argv: tuple[str, ...]) -> None:
    """Whatever their own options are, even ours."""
    find = "transformers.AutoConfig.for_model('nemotron_labs_diffusion')"
    code = f"import trimode_vlm, transformers; print({find}.block_size)"
    file = tmp_path / "program.py"
    file.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{code}")
    assert started_as(*({"CODE": code, "FILE": str(file)}.get(arg, arg) for arg in argv)).startswith("0 32")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("this is no picture")
    with pytest.raises(ValueError, match=r"text\.png"):
        cli.main(["chat", "--image", str(tmp_path / "text.png"), "Hi", "--debug"])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([command, "--help"])
    except SystemExit as stop:  # argparse's own way out of --help
        code = int(stop.code or 0)
    text = capsys.readouterr().out
    assert code == 0 and "examples:" in text and f"trimode-vlm {command}" in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and cli.main([]) == 2
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("trimode-vlm 0.")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m trimode_vlm chat --help | true"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


def test_options_agree_with_the_decoders() -> None:
    assert terminal_options.DRAFTING_MODES == tuple(mode for mode in MODE_OPTIONS if mode not in ("ar", "diffusion"))
    assert set(terminal_options.MODE_OPTIONS) == set(MODE_OPTIONS)
    for mode, names in terminal_options.MODE_OPTIONS.items():
        assert set(names) == MODE_OPTIONS[mode]


def test_bounds_and_dtypes_agree_with_the_library() -> None:
    from trimode_vlm import generation_config, quantize
    from trimode_vlm.checkpoints import parse_dtype

    assert terminal_options.MAX_BLOCK_LENGTH == generation_config.MAX_BLOCK_LENGTH
    assert terminal_options.COMMIT_RULES == generation_config.COMMIT_RULES
    assert terminal_options.VERIFICATIONS == generation_config.VERIFICATIONS
    assert terminal_options.ADAPTIVE_MODES == generation_config.ADAPTIVE_MODES
    assert terminal_options.QUANTIZE_KINDS == quantize.KINDS
    for name in (*cli.DTYPES, *cli.SHORT_DTYPES):
        assert str(parse_dtype(name)).removeprefix("torch.") in cli.DTYPES
        cli.check_dtype(name)
        cli.check_dtype(f"torch.{name}")


def test_layouts_agree_with_the_library() -> None:
    from trimode_vlm import convert
    from trimode_vlm.target_configs import TARGETS

    assert set(convert.LAYOUTS) == set(TARGETS)


# --- YAML -----------------------------------------------------------------------------------------------------------


def parsed(*argv: str) -> Any:
    parser = cli.Parser(prog="trimode-vlm chat")
    terminal.add_arguments(parser)
    parser.add_config_option()
    return parser.parse(argv)


def test_config_file_gives_options_and_the_line_overrides_them(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text("mode: diffusion\nblock_length: 8\nthreshold: 0.5\nimage: [a.png, b.png]\ncompare: false\n")
    args = parsed("--config", str(path), "--threshold", "0.7", "Hi")
    assert (args.mode, args.block_length, args.threshold, args.image) == ("diffusion", 8, 0.7, ["a.png", "b.png"])
    assert args.question == "Hi" and args.compare is False
    assert parsed(f"--config={path}", "--mode=ar").mode == "ar"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("treshold: 0.5", "unknown option 'treshold'; did you mean threshold?"),
        ("mode: difusion", "did you mean diffusion?"),
        ("compare: sometimes", "compare must be true or false"),
        ("- mode", "must hold 'option: value' lines, found a list"),
        ("mode: [", "is not valid YAML"),
        ("day: 2024-99-99", "is not valid YAML"),
        ("threshold:", "threshold has no value; give one or leave it out"),
        ("image: [a.png, null]", "image has no value"),
        ("compare: null", "compare has no value"),
    ],
)
def test_config_file_that_is_wrong(refuse: Any, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "chat.yaml").write_text(text)
    code, line = refuse("chat", "--config", str(tmp_path / "chat.yaml"))
    assert code == 2 and words in line and "--debug" not in line


# --- one question ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODE_OPTIONS)
def test_one_shot_prints_the_answer_alone(chat: Any, chat_model: Any, processor: Any, picture: str, mode: str) -> None:
    code, out, err = chat("--mode", mode, "--image", picture, "What is this?")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **options, return_tensors="pt")
    expected = chat_model.generate(**inputs, mode=mode, max_new_tokens=12)
    ids = expected.sequences[0, inputs["input_ids"].shape[1] :]
    assert code == 0 and out == processor.decode(ids, skip_special_tokens=True) + "\n"
    settings, summary = err.splitlines()
    assert settings.startswith("settings: {")
    # How many forwards auto takes hangs on what they cost and on the requests before.
    forwards = "" if mode == "auto" else f" in {expected.nfe[0]} forwards"
    assert summary.startswith(f"{mode}: {expected.num_new_tokens[0]} tokens{forwards}")


def test_the_commit_rule_of_diffusion_reaches_it(chat: Any, chat_model: Any, processor: Any) -> None:
    """A bound of many nats commits a block at once: two forwards, one of them the prefill."""
    argv = ("--mode", "diffusion", "--block-length", "16", "--commit-rule", "entropy")
    assert "12 tokens in 2 forwards" in chat(*argv, "--entropy-bound", "900", "Hello")[2]
    assert "12 tokens in 2 forwards" not in chat(*argv, "Hello")[2]
    # The modes without such an option take no notice of it.
    assert "quadratic_spec: the same text" in chat("--compare", "--commit-rule", "entropy", "Hello")[1]


def test_a_block_length_of_auto_goes_to_the_modes_that_take_it(chat: Any) -> None:
    out = chat("--compare", "--block-length", "auto", "--verification", "token", "--temperature", "1", "Hello")[1]
    assert "auto: the same text" in out
    assert chat("--mode", "linear_spec", "--verification", "block", "--temperature", "1", "Hello")[0] == 0


def test_what_goes_into_load_does(
    chat_model: Any, processor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from peft import LoraConfig, get_peft_model

    import trimode_vlm

    folder = str(tmp_path / "model")
    chat_model.save_pretrained(folder)
    processor.save_pretrained(folder)
    short = ["chat", "--model", folder, "--max-new-tokens", "4", "--device", "cpu", "Hello"]
    for argv, words in (
        (["--adapter", "auto"], "no draft adapter beside its weights: name its folder with --adapter"),
        (["--mode", "diffusion", "--commit-rule", "learned"], "no learned sampler beside its weights"),
        (["--adapter", str(tmp_path / "none")], "no adapter_config.json"),
    ):
        assert cli.main([*short, *argv]) == 1
        assert words in capsys.readouterr().err
    adapted = trimode_vlm.load(folder)[0]
    config = LoraConfig(r=2, target_modules=r"encoder\.layers.*o_proj", init_lora_weights=False)
    get_peft_model(adapted, config).save_pretrained(tmp_path / "adapter")
    seen: dict[str, Any] = {}
    load = trimode_vlm.load
    monkeypatch.setattr(trimode_vlm, "load", lambda *args, **options: seen.update(options) or load(*args, **options))
    argv = ["--adapter", str(tmp_path / "adapter"), "--quantize", "int8", "--dtype", "float32"]
    assert cli.main([*short, *argv]) == 0
    assert seen == {"device": "cpu", "adapter": argv[1], "quantize": "int8", "dtype": "float32"}


def test_text_only_and_sampling_with_a_seed(chat: Any) -> None:
    options = ("--temperature", "1.5", "--top-k", "20", "Hello")
    first, again, other = (chat(*options, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


def test_compare_prints_each_answer_and_a_table(chat: Any, picture: str) -> None:
    code, out, _ = chat("--compare", "--threshold", "0.5", "--image", picture, "What is this?")
    table = out[out.index("mode  ") :].splitlines()
    assert code == 0 and "linear_spec: the same text" in out and out.startswith("ar:\n")
    assert [line.split()[0] for line in table[2:]] == list(MODE_OPTIONS)
    assert [line.split()[1] for line in table[2:]] == ["12"] * len(MODE_OPTIONS)
    assert table[2].split()[3:5] == ["1.00", "1.00"] and all(line.endswith(" yes") for line in table[4:])
    assert len({len(line) for line in table[1:] if line.endswith(("-", "yes"))}) == 1


# --- other commands -----------------------------------------------------------------------------------------------


def test_convert_writes_a_folder_that_loads(chat_model: Any, processor: Any, tmp_path: Path, capsys: Any) -> None:
    import trimode_vlm

    chat_model.save_pretrained(tmp_path / "ours")
    processor.save_pretrained(tmp_path / "ours")
    capsys.readouterr()  # saving made accelerate import DeepSpeed, which speaks on stdout
    argv = ["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "ministral3"]
    assert cli.main(argv) == 0
    written = capsys.readouterr()
    assert written.out == f"{tmp_path / 'theirs'}\n"
    assert written.err.splitlines()[-1] == "processor: PixtralProcessor, which resizes pictures by its own rule"
    assert "Mistral3ForConditionalGeneration" in (tmp_path / "theirs" / "config.json").read_text()
    (tmp_path / "empty").mkdir()
    assert cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "config.json").is_file()
    model, _ = trimode_vlm.load(tmp_path / "theirs")
    for (name, ours), theirs in zip(chat_model.state_dict().items(), model.state_dict().values(), strict=True):
        assert ours.equal(theirs), name


def test_bench_ends_with_its_document_even_where_the_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(args: Any, note: Any) -> None:
        note("ceiling", "the ceiling", {"ar_tokens_per_sec": 5.0})
        (tmp_path / "reports").rename(tmp_path / "moved")

    monkeypatch.setattr(bench_decode, "bench_decode", measure)
    (tmp_path / "reports").mkdir()
    assert cli.main(["bench", "decode", "--quick", "--json", str(tmp_path / "reports" / "decode.json")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["ceiling"] == {"ar_tokens_per_sec": 5.0}
    assert err.splitlines()[-1].endswith("decode.json: No such file or directory")


# --- a conversation -------------------------------------------------------------------------------------------------


@pytest.fixture
def conversation(chat_model: Any, processor: Any) -> Conversation:
    return Conversation(chat_model, processor, {"max_new_tokens": 6, "do_sample": False})


def test_conversation_over_a_pipe(chat: Any, picture: str) -> None:
    lines = ["What is this?", "/mode ar", "/image " + picture, "And this?", "", "/nonsense", "/image no.png", "/help"]
    code, out, err = chat("--image", picture, stdin="\n".join([*lines, "/quit", "never asked"]))
    assert code == 1 and len(out.splitlines()) >= 2
    assert err.count("tokens in") == 2 and "\nmode ar\n" in err and "\nar: " in err and "linear_spec: " in err
    assert "error: unknown command /nonsense" in err and "no.png" in err and "/clear" in err


def test_a_failed_line_of_a_pipe_shows_in_the_exit_code(chat: Any, chat_model: Any, picture: str) -> None:
    assert chat(stdin=f"/image {picture}\nWhat is this?\n/mode ar\n")[0] == 0
    assert chat("--image", Path(picture).as_uri(), stdin="What is this?")[0] == 0
    code, out, err = chat(stdin="/image\n/image https://a.org/a.png\n")
    assert code == 1 and out == "" and "type /image FILE" in err and "download it first" in err
    code, out, err = chat(stdin="word " * 2 * chat_model.config.max_position_embeddings)
    assert code == 1 and out == "" and len(err.splitlines()) == 3


def test_piped_question_without_newline_and_no_stdin(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(stdin="Hello")[2].count("tokens in") == 1
    assert chat(stdin="")[:2] == (0, "")
    monkeypatch.setattr(sys, "stdin", None)
    assert list(read_lines()) == []


def test_turns_keep_pictures_and_compute_only_what_is_new(conversation: Any, chat_model: Any, picture: str) -> None:
    image = Image.open(picture)
    widths: list[int] = []
    hook = chat_model.encoder.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    try:
        first = "".join(conversation.ask("What is this?", [image]))
        prefilled, widths[:] = widths[0], []
        second = "".join(conversation.ask("Really?"))
    finally:
        hook.remove()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[0]["content"][0]["image"] is image
    assert conversation.messages[1]["content"] == first and conversation.messages[3]["content"] == second
    assert widths[0] < prefilled + 10

    fresh = Conversation(chat_model, conversation.processor, conversation.options)
    fresh.messages = conversation.messages[:2]
    assert "".join(fresh.ask("Really?")) == second
    conversation.clear()
    assert conversation.messages == [] and conversation.cache is None


def test_ctrl_c_stops_the_answer_and_not_the_program(
    conversation: Any, chat_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = chat_model.stream
    conversation.mode = "ar"

    class Interrupted:
        def __init__(self, **options: Any) -> None:
            self.inner = stream(**options)
            self.close, self.output = self.inner.close, self.inner.output

        def __iter__(self) -> Iterator[Any]:
            yield next(self.inner)
            yield next(self.inner)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_model, "stream", lambda **options: Interrupted(**options))
        talk(conversation, [], iter(["Hello"]))
    line = capsys.readouterr().err
    assert "ar: 2 tokens" in line and line.endswith(", stopped\n")
    talk(conversation, [], iter(["Again"]))
    assert "ar: 6 tokens" in capsys.readouterr().err
    assert len(conversation.messages) == 4


def test_a_failed_question_leaves_the_conversation_as_it_was(conversation: Any, chat_model: Any) -> None:
    "".join(conversation.ask("Hello"))
    messages = list(conversation.messages)
    with pytest.raises(ValueError, match="positions"):
        "".join(conversation.ask("word " * 2 * chat_model.config.max_position_embeddings))
    assert conversation.messages == messages
    assert "".join(conversation.ask("Again")) is not None and len(conversation.messages) == 4


def test_system_message_leads(chat_model: Any, processor: Any) -> None:
    conversation = Conversation(chat_model, processor, {"max_new_tokens": 2}, system="Be brief.")
    "".join(conversation.ask("Hello"))
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
