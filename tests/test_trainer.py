"""The loop: exact resume, torn checkpoints, accumulation and ranks, settings, the smoke recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_device
import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from safetensors.torch import load_file
from training_cases import MIXED, sample, tiny_model

import trimode_vlm
from trimode_vlm.decoders import DECODERS
from trimode_vlm.training import saves
from trimode_vlm.training.cli import train
from trimode_vlm.training.data import ListSource, StreamSource
from trimode_vlm.training.distributed import Ranks
from trimode_vlm.training.nano_recipe import NanoSettings
from trimode_vlm.training.optimizers import load_optimizer_tensors, lr_factor, optimizer_tensors
from trimode_vlm.training.settings import build, parse_overrides, read_yaml
from trimode_vlm.training.synthetic import HELD_OUT_SEED, make_sample
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import Trainer

SETTINGS = dict(steps=6, lr=1e-2, block_length=4, micro_batch_tokens=None, micro_batch_samples=2, log_every=1)


def trainer(folder, source=None, dtype=torch.float32, ranks=None, **changes):
    source = source or ListSource([*MIXED, sample(4), sample(5, ((2, 9),))], batch_samples=4)
    return Trainer(tiny_model().to(dtype), source, TrainSettings(**{**SETTINGS, **changes}), folder, ranks)


def weights(t):
    return torch.cat([p.detach().flatten() for p in t.model.parameters()])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_bitwise_also_mid_epoch(tmp_path, optimizer):
    straight = trainer(tmp_path / "a", optimizer=optimizer)
    straight.fit()
    trainer(tmp_path / "b", optimizer=optimizer).fit(until=3)  # 12 of 6-sample epochs: the middle of one
    resumed = trainer(tmp_path / "b", optimizer=optimizer)
    resumed.fit()
    assert resumed.step == 6 and torch.equal(weights(straight), weights(resumed))
    logs = [[json.loads(line) for line in (tmp_path / x / "log.jsonl").read_text().splitlines()] for x in "ab"]
    assert [entry["ar_loss"] for entry in logs[0]] == [entry["ar_loss"] for entry in logs[1]]


def test_torn_newest_checkpoint_is_skipped_with_a_warning(tmp_path):
    first = trainer(tmp_path)
    first.fit(until=2)
    first.fit(until=4)
    newest = saves.checkpoints(tmp_path)[-1]
    assert newest.name == "step-00000004"
    data = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match="torn checkpoint step-00000004"):
        _, _, state = saves.newest_checkpoint(tmp_path)
    assert state["step"] == 2
    for path in tmp_path.rglob("*"):
        assert path.suffix in ("", ".json", ".jsonl", ".safetensors")


def test_optimizer_state_must_name_every_parameter_of_the_run_and_no_other(tmp_path):
    first = trainer(tmp_path, source=ListSource([MIXED[0]], batch_samples=1), micro_batch_samples=1)
    first.train_step()
    tensors = optimizer_tensors(first.optimizers)
    tower = [name for name, _ in first.named if "vision_tower" in name]
    assert tower and all(f"0/{name}/no_state" in tensors for name in tower), "no picture, no gradient, no state"
    again = trainer(tmp_path).optimizers
    load_optimizer_tensors(again, tensors)
    assert optimizer_tensors(again).keys() == tensors.keys()
    head = "0/diffusion_head.weight"
    with pytest.raises(ValueError, match=f"lacks '{head}'"):
        load_optimizer_tensors(again, {k: v for k, v in tensors.items() if not k.startswith(head)})
    with pytest.raises(ValueError, match="'0/another' has no parameter in this run"):
        load_optimizer_tensors(again, {**tensors, "0/another/step": torch.zeros(())})


def test_unfinished_writing_is_invisible(tmp_path):
    (tmp_path / ".writing-00000009").mkdir(parents=True)
    assert saves.newest_checkpoint(tmp_path) is None


def test_batch_equals_accumulation_in_the_update(tmp_path):
    # In double precision: AdamW's first step is the sign of the gradient, also where that is rounding noise.
    updates = []
    for size in (4, 2, 1):
        t = trainer(tmp_path / str(size), micro_batch_samples=size, dtype=torch.float64)
        t.train_step()
        updates.append(weights(t))
    assert torch.allclose(updates[0], updates[1], atol=1e-6) and torch.allclose(updates[0], updates[2], atol=1e-6)


def test_training_learns(tmp_path):
    t = trainer(tmp_path, steps=60, lr=5e-3, warmup=0.1)
    before = t.train_step()
    after = t.fit()
    assert after["ar_loss"] < 0.5 * before["ar_loss"] and after["diff_loss"] < 0.8 * before["diff_loss"]


def test_nan_stops_with_step_and_samples(tmp_path):
    t = trainer(tmp_path)
    with torch.no_grad():
        t.model.diffusion_head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"step 0, samples \[\d"):
        t.train_step()


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
from trimode_vlm.training.distributed import Ranks
torch.set_num_threads(1)
ranks = Ranks.start()
t = trainer(Path(sys.argv[1]), dtype=torch.float64, ranks=ranks)
t.fit(until=2)
if ranks.is_main:
    save_file({"weights": weights(t)}, Path(sys.argv[1]) / "weights.safetensors")
ranks.stop()
"""


def test_two_ranks_equal_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "r2"),
    ]
    subprocess.run([sys.executable, *command], check=True, env=env, timeout=600, capture_output=True)
    one = trainer(tmp_path / "r1", dtype=torch.float64)
    one.fit(until=2)
    two = load_file(tmp_path / "r2" / "weights.safetensors")["weights"]
    assert torch.allclose(weights(one), two, atol=1e-6)


@pytest.mark.parametrize(
    "num_gpus, world, local_world, expected",
    [
        (0, 2, 2, ("gloo", "cpu")),
        (1, 2, 2, ("gloo", "cpu")),  # NCCL refuses two ranks on one GPU
        (2, 2, 2, ("nccl", "cuda:1")),
        (2, 4, 2, ("nccl", "cuda:1")),  # two machines
        (1, 1, 1, (None, "cuda:0")),
        (0, 1, 1, (None, "cpu")),
    ],
)
def test_collectives_and_device_go_together(monkeypatch, num_gpus, world, local_world, expected):
    backends = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: backends.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: world - 1)
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local_world), ("LOCAL_RANK", local_world - 1)):
        monkeypatch.setenv(name, str(value))
    ranks = Ranks.start()
    assert (backends[0] if backends else None, str(ranks.device)) == expected
    assert (ranks.rank, ranks.world) == (world - 1, world)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_lies_on_the_ranks_device_and_equals_one_on_the_cpu(tmp_path, optimizer):
    """What a GPU would refuse is refused here: an operation between tensors of two devices."""
    here = trainer(tmp_path / "cpu", optimizer=optimizer)
    here.fit(until=3)
    with FakeDevice() as fake:
        ranks = Ranks(device=fake_device.DEVICE)
        for until in (2, 3):  # with a checkpoint and a resume in between
            there = trainer(tmp_path / "fake", optimizer=optimizer, ranks=ranks)
            there.fit(until=until)
    state = {k: v for o, _ in there.optimizers for values in o.state.values() for k, v in values.items()}
    assert len(state) >= 2
    for name, value in [*state.items(), *there.model.named_parameters()]:
        assert fake.holds(value) == (name != "step"), name
    assert torch.equal(weights(here), weights(there))


def test_schedules_end_at_zero():
    for schedule in ("cosine", "wsd"):
        factors = [lr_factor(i / 100, 0.1, schedule) for i in range(101)]
        assert factors[0] == 0 and max(factors) == pytest.approx(1) and factors[-1] == pytest.approx(0, abs=1e-9)
    assert lr_factor(0.5, 0.1, "wsd") == 1


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
    assert "alpha: 0.3" in capsys.readouterr().out
    for folder in ("model", "control_model"):
        model, processor = trimode_vlm.load(tmp_path / folder)
        messages = make_sample("grid_cell", HELD_OUT_SEED).messages[:1]
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert torch.isfinite(model(**inputs).logits).all()
        answers = {mode: model.generate(**inputs, mode=mode, max_new_tokens=40).sequences for mode in DECODERS}
        assert set(answers) == {"ar", "diffusion", "linear_spec"} and all(len(rows[0]) for rows in answers.values())
        assert answers["ar"][0].tolist() == answers["linear_spec"][0].tolist()
        assert sum(f.stat().st_size for f in (tmp_path / folder).iterdir()) < 16e6
    vision, joint, control = (
        json.loads((tmp_path / name / "done.json").read_text()) for name in ("vision", "joint", "control")
    )
    assert joint["step"] == control["step"] == 20
    assert 0 <= vision["metrics"]["held_out_filled_accuracy"] <= 1
    log = (tmp_path / "joint" / "log.jsonl").read_text()
    assert train(command) == 0  # everything is done already
    assert (tmp_path / "joint" / "log.jsonl").read_text() == log
    capsys.readouterr()
    assert train([*command, "--seed", "1"]) == 1
    error = capsys.readouterr().err.strip()
    assert "seed was 0, is 1" in error and "another --out" in error and "\n" not in error
