"""The page on fine-tuning is run: its data, its YAML and its commands, in order, on a tiny model."""

import json
import re
import shlex

import pytest
from conftest import REPOSITORY
from PIL import Image
from test_finetune import vlm_folder  # noqa: F401 - a fixture

import trimode_vlm
from trimode_vlm.cli import main
from trimode_vlm.training.settings import read_yaml
from trimode_vlm.training.train_settings import TrainSettings

PAGE = (REPOSITORY / "training" / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture
def folder(tmp_path, vlm_folder, monkeypatch):  # noqa: F811
    """The user's folder: the page's rows several times over, its pictures and its YAML with a tiny model."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in blocks("json")[0].splitlines()]
    for name in ("a.png", "b.png"):
        Image.new("RGB", (56, 28), "red").save(tmp_path / name)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 5))
    import datasets

    dialogs = [[{"from": "human", "value": f"Say {n}"}, {"from": "gpt", "value": f"It is {n}."}] for n in range(8)]
    datasets.Dataset.from_dict({"dialog": dialogs}).to_parquet(tmp_path / "more.parquet")
    text = blocks("yaml")[0].replace("model: MODEL ", f"model: {vlm_folder} ")
    assert str(vlm_folder) in text
    (tmp_path / "my.yaml").write_text(text)
    return tmp_path


def test_every_command_of_the_page_runs(folder, capsys):
    commands = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 9
    for name, *argv in commands:
        assert name == "trimode-vlm"
        assert main(argv) == 0, (argv, capsys.readouterr().err)
        out = capsys.readouterr()
        if "--check" in argv:
            assert "every sample can be trained on" in out.out
        if "--estimate" in argv:
            assert "GPU" in out.out
        if argv[0] == "chat":
            assert out.out.strip()
    assert (folder / "pattern.png").is_file() and (folder / "exported" / "config.json").is_file()
    for run in ("mine", "lora"):
        assert (folder / "runs" / run / "curves.png").is_file()
    assert (folder / "runs" / "lora" / "adapter" / "adapter_config.json").is_file()
    drafting, _ = trimode_vlm.load(folder / "runs" / "mine" / "model", adapter="auto")
    assert drafting.draft_adapter is not None and drafting.learned_sampler is not None
    answers = [json.loads(line) for line in (folder / "runs" / "mine" / "generations.jsonl").read_text().splitlines()]
    assert set(answers[-1]["totals"]) == {"ar", "diffusion", "linear_spec"}


def test_the_page_names_settings_that_exist():
    from trimode_vlm.training.finetune import FinetuneSettings

    known = set(FinetuneSettings.__dataclass_fields__)
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named and set(named) <= known
    assert set(TrainSettings.__dataclass_fields__) <= known
    read_yaml("finetune")
