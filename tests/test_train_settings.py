"""Settings are checked before anything is trained, and a folder is not trained on with others by accident."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from test_trainer import trainer

from trimode_vlm.training import saves
from trimode_vlm.training.cli import train
from trimode_vlm.training.finetune import FinetuneSettings
from trimode_vlm.training.nano_recipe import NanoSettings, TextStage, run
from trimode_vlm.training.nano_vision import VisionTrainer
from trimode_vlm.training.settings import build, parse_overrides, read_yaml
from trimode_vlm.training.train_settings import TrainSettings, changes
from trimode_vlm.training.trainer import TriModeTrainer

WRONG = [
    ("--joint.schedule cosin", "joint.schedule must be one of cosine, wsd, got 'cosin'"),
    ("--joint.optimizer moun", "joint.optimizer must be one of adamw, muon, got 'moun'"),
    ("--ar.averaging x", "ar.averaging must be one of tokens, masked, pooled, sequence, got 'x'"),
    ("--vision.noise token", "vision.noise must be one of sequence, block, got 'token'"),
    ("--joint.weight 2", "joint.weight must be one of 1/p, 1, got '2'"),
    ("--joint.response_padding all", "joint.response_padding must be one of none, block, got 'all'"),
    ("--joint.tasks foo", "setting 'joint.tasks': 'foo' is not"),
    ("--joint.tasks.foo 1", "got 'foo'"),
    ("--joint.tasks.grid_json many", "'joint.tasks.grid_json': 'many' is not"),
    ("--joint.tasks {}", "joint.tasks must have weights of at least 0, one of them above, got {}"),
    ("--joint.tasks.grid_json -1", "joint.tasks must have weights of at least 0"),
    ("--joint 0.5", "joint must be a mapping of settings, got 0.5"),
    ("--joint 0.5 --joint.alpha 0.5", "--joint is given twice"),
    ("--joint.tasks {a", "--joint.tasks is not valid YAML"),
    ("--ar.steps 0", "ar.steps must be at least 1, got 0"),
    ("--ar.micro_batch_tokens 0", "ar.micro_batch_tokens must be at least 1, got 0"),
    ("--vision.lr 0", "vision.lr must be above 0, got 0.0"),
    ("--joint.stall_minutes -5", "joint.stall_minutes must be at least 0, got -5.0"),
    ("--joint.deepspeed zero9", "deepspeed must be a JSON file or one of zero0"),
    ("--joint.report_to [mlflow]", "joint.report_to must be among tensorboard, wandb, got 'mlflow'"),
    ("--joint.alpha nan", "joint.alpha must be at least 0, got nan"),
    ("--joint.alpha -1", "joint.alpha must be at least 0, got -1.0"),
    ("--joint.alpha inf", "joint.alpha must be at least 0, and finite, got inf"),
    ("--joint.lr .inf", "joint.lr must be above 0, and finite, got inf"),
    ("--joint.lr nan", "joint.lr must be above 0, got nan"),
    ("--joint.steps nan", "'joint.steps': nan is not a int"),
    ("--joint.seed 1e40", "joint.seed must be between 0 and 9223372036854775807"),
    ("--seed -1", "seed must be between 0 and 9223372036854775807, got -1"),
    ("--model.hiden_size 3", "unknown setting 'model.hiden_size'; the nearest known one is 'model.hidden_size'"),
    ("--out /proc/no/such", "out /proc/no/such: not a folder that can be made"),
    ("--out ''", "out must name a folder, got ''"),
    ("--joint.warmup 3", "joint.warmup must be between 0 and 1, got 3.0"),
    ("--joint.block_length [32,0]", "joint.block_length must be at least 1, got (32, 0)"),
    ("--joint.block_length [32,x]", "'joint.block_length': 'x' is not a int"),
    ("--joint.betas [0.9]", "joint.betas must be two numbers"),
    ("--ar.qa_share 2", "ar.qa_share must be between 0 and 1, got 2.0"),
    ("--threads 0", "threads must be at least 1, got 0"),
    ("--deepspeed zero1", "optimizer 'muon' needs whole matrices"),
    ("--recipe micro", "recipe must be one of finetune, draft_lora, learned_sampler, nano, got 'micro'"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=[options for options, _ in WRONG])
def test_a_wrong_setting_is_one_line_before_anything_starts(tmp_path, capsys, options, message):
    options = options.split()
    assert train(["--config", "nano-smoke", "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: write settings into it, or {} for the defaults"),
        (b"# later\n", "is empty"),
        (b"\xff\xfe", "cannot be read as text"),
        (b"1: 2\n", "unknown setting '1'"),
        (b"- a\n", "expected a mapping of settings, found list"),
        (b"recipe: nano\njoint:\n", "joint must be a mapping of settings, got None"),
    ],
)
def test_a_config_file_that_holds_no_settings(tmp_path, capsys, content, words):
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    assert train(["--config", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert str(path) in error or "setting" in error


def test_an_out_that_is_a_file(tmp_path, capsys):
    (tmp_path / "out").touch()
    for out in (tmp_path / "out", tmp_path / "out" / "x"):
        assert train(["--config", "nano-smoke", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert f"out {out}: not a folder that can be made" in error and error.count("\n") == 1


def test_infinity_switches_off_what_it_can():
    assert TrainSettings(grad_clip=math.inf, stall_minutes=math.inf).grad_clip == math.inf


def test_settings_are_checked_in_code_too_and_the_shipped_ones_are_right():
    with pytest.raises(ValueError, match="^schedule must be one of"):
        TrainSettings(schedule="cosin")
    with pytest.raises(ValueError, match="^optimizer must be one of"):
        TextStage(optimizer="moun")
    for name in ("nano", "nano-smoke"):
        build(NanoSettings, read_yaml(name))
    assert NanoSettings().joint.tasks
    assert build(NanoSettings, parse_overrides(["--joint.weight", "1"])).joint.weight == "1"


def test_what_counts_as_a_change():
    old = TrainSettings(steps=10, block_length=(32, 16)).fingerprint()
    assert changes(old, old) == [] and old["block_length"] == [32, 16]
    assert changes(old, {**old, "steps": 20}) == [], "more of the same"
    assert changes(old, {**old, "steps": 9}) == ["steps was 10, is 9"]
    assert changes({}, old) == [] and changes({**old, "gone": 1}, old) == [], "written by another version"
    tasks = [{"tasks": {"a": 1, "b": 2}}, {"tasks": {"a": 1, "c": 2}}]
    assert changes(*tasks) == ["tasks.b was 2, is None", "tasks.c was None, is 2"]
    assert "log_every" not in old and "micro_batch_tokens" not in old


def test_a_fine_tuning_goes_on_where_only_its_end_its_export_or_its_place_changed():
    old = FinetuneSettings(data=("a.jsonl",), epochs=1.0, steps=10)
    more = replace(old, epochs=2.0, steps=20, merge=False, threads=2, out="elsewhere", on_bad_sample="skip")
    more = replace(more, allow_changed_settings=True)
    assert changes(old.fingerprint(), more.fingerprint()) == []
    assert changes(more.fingerprint(), old.fingerprint()) == ["steps was 20, is 10", "epochs was 2.0, is 1.0"]


def test_a_half_done_folder_is_not_trained_on_with_other_settings(tmp_path):
    trainer(tmp_path, until=2).fit()
    with pytest.raises(ValueError, match=r"seed was 0, is 1; lr was 0.01, is 0.02\): give another --out") as error:
        trainer(tmp_path, seed=1, lr=2e-2, until=3).fit()
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    more = trainer(tmp_path, steps=8, log_every=5, micro_batch_samples=4, until=3)
    more.fit()
    assert more.state.global_step == 3
    allowed = trainer(tmp_path, steps=8, lr=2e-2, until=4)
    allowed.allow_changed = True
    allowed.fit()
    assert allowed.state.global_step == 4
    assert saves.read_run(saves.newest_checkpoint(tmp_path))["settings"]["lr"] == 2e-2


@pytest.fixture
def stages_run(monkeypatch):
    """The nano recipe with steps that train nothing; gives the names of the stages that took any."""
    names = []

    def fit(self):
        first = saves.newest_checkpoint(self.folder)
        if first is not None and saves.step_of(first) >= self.settings.steps:
            return {}
        names.append(self.name)
        checkpoint = self.folder / f"checkpoint-{self.settings.steps}"
        checkpoint.mkdir(parents=True)
        saves.save_weights(self.model, checkpoint / "model.safetensors")
        saves.write_run(checkpoint, settings=self.fingerprint, world=1)
        saves.write_manifest(checkpoint)
        return {"ar_loss": 1.0}

    for cls in (TriModeTrainer, VisionTrainer):
        monkeypatch.setattr(cls, "fit", fit)

    def stages(out, *options):
        names.clear()
        layers = read_yaml("nano-smoke"), parse_overrides(["--out", str(out), *" ".join(options).split()])
        run(build(NanoSettings, *layers))
        return list(dict.fromkeys(names))

    return stages


def test_a_finished_folder_and_changed_settings(tmp_path, stages_run):
    out = tmp_path / "out"
    assert stages_run(out) == ["vision", "ar", "joint"]
    done = json.loads((out / "joint" / "done.json").read_text())
    assert done["step"] == 20 and done["settings"]["tasks"] and done["settings"]["model"]["hidden_size"] == 64
    assert stages_run(out) == []
    for options, difference in [
        ("--seed 1", f"{out / 'vision'} was trained with other settings (seed was 0, is 1)"),
        ("--joint.alpha 0.5", f"{out / 'joint'} was trained with other settings (alpha was 0.3, is 0.5)"),
        ("--joint.tasks.grid_json 1", "tasks.grid_markdown was 1.0, is None"),
        ("--joint.steps 10", "steps was 20, is 10"),
        ("--model.hidden_size 32", "model.hidden_size was 64, is 32"),
    ]:
        with pytest.raises(ValueError) as error:
            stages_run(out, options)
        assert difference in str(error.value) and "--out" in str(error.value) and "\n" not in str(error.value)
    assert stages_run(out, "--joint.tasks.grid_json 1 --allow_changed_settings true") == [], "done is done"
    assert stages_run(out, "--joint.steps 22 --joint.log_every 1") == ["joint"], "the last stage goes on"
    assert json.loads((out / "joint" / "done.json").read_text())["step"] == 22
    assert stages_run(out, "--joint.steps 22 --control true") == ["control"]
    assert stages_run(out, "--joint.steps 24 --control true") == ["joint", "control"]


def test_a_stage_is_not_trained_anew_under_one_that_started_from_it(tmp_path, stages_run):
    out = tmp_path / "out"
    stages_run(out)
    with pytest.raises(ValueError, match=rf"{out / 'joint'} was trained from {out / 'ar'}, .*delete {out / 'joint'}"):
        stages_run(out, "--ar.steps 30")
    shutil.rmtree(out / "joint")
    assert stages_run(out, "--ar.steps 30") == ["ar", "joint"]
    shutil.rmtree(out / "vision")
    with pytest.raises(ValueError, match=rf"{out / 'ar'} was trained from {out / 'vision'}"):
        stages_run(out, "--ar.steps 30")
