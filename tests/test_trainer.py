"""The loop: exact resume, torn checkpoints, accumulation and ranks, settings, the smoke recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_cases import MIXED, sample, tiny_model
from transformers import AutoModelForImageTextToText, TrainerCallback

import trimode_vlm
from trimode_vlm.decoders import DECODERS
from trimode_vlm.training import distributed, saves
from trimode_vlm.training.arguments import training_arguments
from trimode_vlm.training.cli import train
from trimode_vlm.training.data import ListSource, StreamSource
from trimode_vlm.training.nano_recipe import NanoSettings
from trimode_vlm.training.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors
from trimode_vlm.training.settings import build, parse_overrides, read_yaml
from trimode_vlm.training.synthetic import HELD_OUT_SEED, make_sample
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import TriModeTrainer

SETTINGS = dict(steps=6, lr=1e-2, block_length=4, micro_batch_tokens=None, micro_batch_samples=2, log_every=1)
SAMPLES = [*MIXED, sample(4), sample(5, ((2, 9),))]


class StopAt(TrainerCallback):
    """Ends training after a step, with a checkpoint, as a user's Ctrl-C between two saves would not."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            control.should_training_stop = control.should_save = True


def trainer(folder, source=None, dtype=torch.float32, until=None, model=None, **changes):
    source = source or ListSource(SAMPLES, batch_samples=4)
    callbacks = [StopAt(until)] if until else []
    settings = TrainSettings(**{**SETTINGS, **changes})
    return TriModeTrainer(model or tiny_model().to(dtype), source, settings, folder, callbacks=callbacks)


def weights(t):
    return torch.cat([p.detach().flatten() for p in t.model.parameters()])


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bitwise_also_mid_epoch(tmp_path, optimizer, workers):
    straight = trainer(tmp_path / "a", optimizer=optimizer)
    straight.fit()
    trainer(tmp_path / "b", optimizer=optimizer, until=3, workers=workers).fit()  # 12 of 6-sample epochs: mid-epoch
    resumed = trainer(tmp_path / "b", optimizer=optimizer, workers=workers)
    resumed.fit()
    assert resumed.state.global_step == 6 and torch.equal(weights(straight), weights(resumed))
    logs = [log_of(tmp_path / x) for x in "ab"]
    assert [entry["step"] for entry in logs[1]] == [1, 2, 3, 4, 5, 6]
    for name in ("ar_loss", "diff_loss", "learning_rate", "grad_norm", "samples_seen"):
        assert [entry[name] for entry in logs[0]] == [entry[name] for entry in logs[1]], name


def test_torn_newest_checkpoint_is_skipped_with_a_warning(tmp_path):
    trainer(tmp_path, until=4, save_every=2).fit()
    newest = saves.checkpoints(tmp_path)[-1]
    assert newest.name == "checkpoint-4"
    data = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match="torn checkpoint checkpoint-4"):
        assert saves.newest_checkpoint(tmp_path).name == "checkpoint-2"
    with pytest.warns(UserWarning, match="torn checkpoint"):
        resumed = trainer(tmp_path)
        resumed.fit()
    straight = trainer(tmp_path / "straight")
    straight.fit()
    assert torch.equal(weights(resumed), weights(straight))
    for path in tmp_path.rglob("*"):
        assert path.suffix in ("", ".json", ".jsonl", ".safetensors", ".png") or path.is_dir(), "no pickle"


def test_a_checkpoint_without_its_manifest_was_being_written(tmp_path):
    trainer(tmp_path, until=4, save_every=2).fit()
    (tmp_path / "checkpoint-4" / saves.MANIFEST).unlink()
    with pytest.warns(UserWarning, match="torn"):
        assert saves.newest_checkpoint(tmp_path).name == "checkpoint-2"


def test_checkpoints_rotate_and_each_is_a_model_folder(tmp_path):
    t = trainer(tmp_path, save_every=1, keep_checkpoints=2)
    t.fit()
    assert [path.name for path in saves.checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-6"]
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "checkpoint-6")
    for name, tensor in t.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_the_best_checkpoint_is_kept(tmp_path):
    held_out = ListSource([sample(9, ((4, 8),))], batch_samples=1)
    model = tiny_model()
    # The loss on the held-out sample gets worse with steps that go far too far.
    settings = TrainSettings(**{**SETTINGS, "lr": 0.5, "eval_every": 1, "keep_checkpoints": 1, "save_every": 6})
    t = TriModeTrainer(model, ListSource(SAMPLES, batch_samples=4), settings, tmp_path, eval_source=held_out)
    t.fit()
    losses = [entry["eval_loss"] for entry in log_of(tmp_path) if "eval_loss" in entry]
    best = losses.index(min(losses)) + 1
    assert len(losses) == 6 and t.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert {p.name for p in saves.checkpoints(tmp_path)} == {f"checkpoint-{best}", "checkpoint-6"}


def test_evaluation_repeats_itself_and_leaves_training_alone(tmp_path):
    held_out = ListSource([sample(9, ((4, 8),)), *MIXED], batch_samples=2)
    settings = TrainSettings(**{**SETTINGS, "eval_every": 2})
    t = TriModeTrainer(
        tiny_model(), ListSource(SAMPLES, batch_samples=4), settings, tmp_path / "a", eval_source=held_out
    )
    t.fit()
    without = trainer(tmp_path / "b")
    without.fit()
    assert torch.equal(weights(t), weights(without))
    assert t.evaluate()["eval_ar_loss"] == t.evaluate()["eval_ar_loss"]
    evaluated = [entry for entry in log_of(tmp_path / "a") if "eval_samples" in entry]
    assert {entry["eval_samples"] for entry in evaluated} == {5.0}


def test_optimizer_state_must_name_every_parameter_of_the_run_and_no_other():
    model = tiny_model()
    named = list(model.named_parameters())
    groups = [{"params": [p for _, p in named], "lr": 1e-2, "weight_decay": 0.1}]
    first = make_optimizer(named, groups, "muon")
    model(input_ids=torch.tensor([[8, 9, 10]]), labels=torch.tensor([[8, 9, 10]])).loss.backward()
    first.step()
    tensors = optimizer_tensors(first, named)
    tower = [name for name, _ in named if "vision_tower.ln_pre" in name]
    assert tower and all(name in {key.rpartition("/")[0] for key in tensors} for name in tower)
    again = make_optimizer(named, groups, "muon")
    load_optimizer_tensors(again, named, tensors)
    assert optimizer_tensors(again, named).keys() == tensors.keys()
    head = "diffusion_head.weight"
    with pytest.raises(ValueError, match=f"lacks '{head}'"):
        load_optimizer_tensors(again, named, {k: v for k, v in tensors.items() if not k.startswith(head)})
    with pytest.raises(ValueError, match="'another' has no parameter in this run"):
        load_optimizer_tensors(again, named, {**tensors, "another/step": torch.zeros(())})


def test_a_text_only_step_keeps_the_loss_and_gives_the_tower_gradients_of_zero(tmp_path):
    losses = []
    for freeze in (False, True):
        t = trainer(tmp_path / str(freeze), ListSource([MIXED[0]], batch_samples=1), steps=1)
        tower = [(n, p) for n, p in t.model.named_parameters() if "vision_tower" in n or "projector" in n]
        for _, p in tower:
            p.requires_grad_(not freeze)
        losses.append(t.training_step(t.model, t.make_batches(t.source)(0)))
        assert all((p.grad is None) if freeze else (p.grad is not None and not p.grad.any()) for _, p in tower)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("changes", [{"micro_batch_samples": 2}, {"micro_batch_samples": 1}, {"packing_length": 200}])
def test_batch_equals_accumulation_and_packing_in_the_update(tmp_path, changes):
    # In double precision: AdamW's first step is the sign of the gradient, also where that is rounding noise.
    updates = []
    for number, options in enumerate(({"micro_batch_samples": 4}, changes)):
        t = trainer(tmp_path / str(number), dtype=torch.float64, until=1, **options)
        t.fit()
        updates.append(weights(t))
    assert torch.allclose(updates[0], updates[1], atol=1e-6)


def test_training_learns(tmp_path):
    t = trainer(tmp_path, steps=60, lr=5e-3, warmup=0.1)
    t.fit()
    before, *_, after = log_of(tmp_path)
    assert after["ar_loss"] < 0.5 * before["ar_loss"] and after["diff_loss"] < 0.8 * before["diff_loss"]


def test_stages_of_alpha_and_block_length(tmp_path):
    t = trainer(tmp_path, ar_share=0.5, block_length_schedule=[[0, 2], [0.7, 8]])
    t.fit()
    log = log_of(tmp_path)
    assert ["diff_loss" in entry for entry in log] == [False] * 3 + [True] * 3
    lengths = [t.settings.noise_settings(step, **t.make_batches(t.source).token_ids).block_length for step in range(6)]
    assert lengths[0] == 2 and lengths[-1] == 8


def test_nan_stops_with_step_and_samples(tmp_path):
    t = trainer(tmp_path)
    with torch.no_grad():
        t.model.diffusion_head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"not finite at step 1, samples \d.*lower lr"):
        t.fit()
    assert saves.newest_checkpoint(tmp_path) is None


def test_the_order_of_an_epoch_is_made_once(monkeypatch):
    made, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **options: made.append(n) or randperm(n, **options))
    source = ListSource(MIXED, batch_samples=3, seed=12345)
    drawn = [s for step in range(8) for s in source.draw(step, 0, 1)]
    assert made == [4] * 6, "24 samples, six epochs of four"
    expected = [randperm(4, generator=torch.Generator().manual_seed(12345 + epoch)).tolist() for epoch in range(6)]
    assert [s.sample_id for s in drawn] == [MIXED[i].sample_id for order in expected for i in order]
    assert [s.epoch for s in drawn] == [number // 4 for number in range(24)]


def test_stream_ids_never_meet():
    source = StreamSource(lambda number, step: sample(number), lambda s: len(s.input_ids), 100)
    ids = [s.sample_id for step in range(3) for rank in range(2) for s in source.draw(step, rank, 2)]
    assert len(ids) == len(set(ids))


TWO_RANKS = """
import sys, torch
from safetensors.torch import save_file
from pathlib import Path
from test_trainer import trainer, weights
from trimode_vlm.training import distributed
torch.set_num_threads(1)
distributed.start()
t = trainer(Path(sys.argv[1]), dtype=torch.float64, until=int(sys.argv[2]))
t.fit()
assert distributed.num_ranks() == 2
if distributed.rank() == 0:
    save_file({"weights": weights(t)}, Path(sys.argv[1]) / "weights.safetensors")
distributed.stop()
"""


def two_ranks(tmp_path, folder, until):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(script), str(folder), str(until)]
    done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "weights.safetensors")["weights"]


def test_two_ranks_equal_one_and_one_goes_on_where_two_stopped(tmp_path):
    """One rank gets text only in some steps, the other pictures; micro-batches are of unequal number."""
    two = two_ranks(tmp_path, tmp_path / "r2", 2)
    one = trainer(tmp_path / "r1", dtype=torch.float64, until=2)
    one.fit()
    assert torch.allclose(weights(one), two, atol=1e-6)
    more = [trainer(tmp_path / folder, dtype=torch.float64, until=4) for folder in ("r1", "r2")]
    for t in more:
        t.fit()
    assert torch.allclose(weights(more[0]), weights(more[1]), atol=1e-6)
    saved = saves.read_run(saves.newest_checkpoint(tmp_path / "r2"))
    assert saved["world"] == 1


@pytest.mark.parametrize(
    "num_gpus, local_world, on_cpu",
    [(0, 2, True), (1, 2, True), (2, 2, False), (1, 1, False), (0, 1, True)],  # NCCL refuses two ranks on one GPU
)
def test_ranks_take_a_gpu_each_or_none(monkeypatch, num_gpus, local_world, on_cpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world))
    assert distributed.use_cpu() == on_cpu


def test_one_process_takes_one_gpu_of_several(monkeypatch, tmp_path):
    """transformers would copy the model to all of them (DataParallel), which cannot split a step of ours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(distributed, "use_cpu", lambda: False)
    assert training_arguments(TrainSettings(), tmp_path).n_gpu == 1


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedules_rise_and_end_at_their_share(tmp_path, schedule):
    t = trainer(tmp_path, steps=40, warmup=0.1, schedule=schedule, min_lr_ratio=0.1)
    t.fit()
    rates = [entry["learning_rate"] for entry in log_of(tmp_path)]
    assert rates[0] < 0.3 * max(rates) and max(rates) == pytest.approx(1e-2)
    assert rates[-1] < 0.2 * max(rates) and min(rates[5:]) >= 0.1 * max(rates) * 0.99


def test_settings_layers_and_errors():
    settings = build(
        NanoSettings, read_yaml("nano"), parse_overrides(["--joint.alpha", "0.5", "--ar.lr=1e-3", "--seed", "7"])
    )
    assert (settings.joint.alpha, settings.ar.lr, settings.seed) == (0.5, 1e-3, 7)
    with pytest.raises(ValueError, match="'joint.alhpa'.*nearest known one is 'joint.alpha'"):
        build(NanoSettings, parse_overrides(["--joint.alhpa", "1"]))
    with pytest.raises(ValueError, match="'joint.steps'"):
        build(NanoSettings, parse_overrides(["--joint.steps", "many"]))
    with pytest.raises(ValueError, match="nano-smoke"):
        read_yaml("nanoo")


def test_wrong_usage_is_one_line_and_exit_code_two(capsys):
    assert train(["--config", "nano-smoke", "--joint.alhpa", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "joint.alpha" in error


def test_smoke_recipe_makes_a_model_folder_and_resumes(tmp_path, capsys):
    command = ["--config", "nano-smoke", "--out", str(tmp_path), "--control", "true"]
    assert train(command) == 0
    assert "control: true" in capsys.readouterr().out
    assert build(NanoSettings, read_yaml(str(tmp_path / "settings.yaml"))) == build(
        NanoSettings, read_yaml("nano-smoke"), {"out": str(tmp_path), "control": True}
    )
    for folder in ("model", "control_model"):
        model, processor = trimode_vlm.load(tmp_path / folder)
        messages = make_sample("grid_cell", HELD_OUT_SEED).messages[:1]
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert torch.isfinite(model(**inputs).logits).all()
        answers = {mode: model.generate(**inputs, mode=mode, max_new_tokens=40).sequences for mode in DECODERS}
        assert all(len(rows[0]) for rows in answers.values())
        for mode in ("linear_spec", "quadratic_spec"):
            assert answers["ar"][0].tolist() == answers[mode][0].tolist()
        assert sum(f.stat().st_size for f in (tmp_path / folder).iterdir()) < 16e6
    vision, joint, control = (
        json.loads((tmp_path / name / "done.json").read_text()) for name in ("vision", "joint", "control")
    )
    assert "diff_loss" in joint["metrics"] and "diff_loss" not in control["metrics"]
    assert joint["step"] == control["step"] == 20
    assert 0 <= vision["metrics"]["held_out_filled_accuracy"] <= 1
    log = (tmp_path / "joint" / "log.jsonl").read_text()
    assert train(command) == 0  # everything is done already
    assert (tmp_path / "joint" / "log.jsonl").read_text() == log
    capsys.readouterr()
    assert train([*command, "--seed", "1"]) == 1
    error = capsys.readouterr().err.strip()
    assert "seed was 0, is 1" in error and "another --out" in error and "\n" not in error
