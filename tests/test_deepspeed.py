"""DeepSpeed on two gloo ranks: every ZeRO stage trains as one process does, resumes, survives a kill, and exports."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serving import free_port
from test_finetune import FAST, vlm_folder, write_rows  # noqa: F401 - a fixture
from test_trainer import log_of, trainer
from training_cases import MIXED, sample
from transformers import TrainerCallback

import trimode_vlm
from trimode_vlm.training import distributed, saves
from trimode_vlm.training.cli import train
from trimode_vlm.training.data import ListSource

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

SCRIPT = """
import sys
from test_deepspeed import run_jobs
run_jobs(sys.argv[1])
"""
STEPS = 20


class Kill(TrainerCallback):
    """What the kernel does to a rank that is out of memory."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def source():
    """Text in one rank's samples and pictures of several sizes in the other's: sample n goes to rank n % 2."""
    return ListSource([sample(10), MIXED[1], sample(11, ((4, 7),)), MIXED[3]], batch_samples=4)


def run_jobs(text):
    """In each of the ranks: train job after job, each with the options of one trainer."""
    torch.set_num_threads(1)
    distributed.start()
    for options in json.loads(text):
        folder, kill = Path(options.pop("folder")), options.pop("kill", None)
        t = trainer(folder, source(), steps=STEPS, lr=1e-3, **options)
        if kill:
            t.add_callback(Kill(kill))
        t.fit()
        t.save_model(str(folder / "model"))
    distributed.stop()


def launch(tmp_path, *jobs, ranks=2):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(script), json.dumps(jobs)], env=env, timeout=500, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of one process ("one"), of each stage ("zero0" ...), and of a stage stopped and resumed half-way."""
    folder = tmp_path_factory.mktemp("runs")
    trainer(folder / "one", source(), steps=STEPS, lr=1e-3).fit()
    jobs = [{"folder": str(folder / f"zero{stage}"), "deepspeed": f"zero{stage}"} for stage in range(4)]
    for stage in (2, 3):
        half = {"folder": str(folder / f"half{stage}"), "deepspeed": f"zero{stage}"}
        jobs += [{**half, "until": STEPS // 2}, half]
    done = launch(folder, *jobs)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_reaches_the_losses_of_one_process(runs, stage):
    logs = [log_of(runs / name) for name in ("one", f"zero{stage}")]
    # DeepSpeed's plain fp32 optimizer (stage 0) tells no norm.
    for name in ("ar_loss", "diff_loss", *(("grad_norm",) if stage else ())):
        values = [torch.tensor([entry[name] for entry in log]) for log in logs]
        assert len(values[0]) == STEPS
        torch.testing.assert_close(*values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_exports_whole_weights(runs, stage):
    saved = load_file(runs / f"zero{stage}" / "model" / "model.safetensors")
    one = load_file(runs / "one" / f"checkpoint-{STEPS}" / "model.safetensors")
    assert saved.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-4, rtol=1e-3)
    model, _ = trimode_vlm.load(runs / f"zero{stage}" / "model")
    assert torch.isfinite(model(input_ids=torch.tensor([[8, 9]])).logits).all()


@pytest.mark.parametrize("stage", (2, 3))
def test_a_resumed_run_is_the_unbroken_one(runs, stage):
    straight, half = (load_file(runs / f"{n}{stage}" / "model" / "model.safetensors") for n in ("zero", "half"))
    for name, tensor in straight.items():
        assert torch.equal(tensor, half[name]), name
    assert [entry["step"] for entry in log_of(runs / f"half{stage}")] == list(range(1, STEPS + 1))


def test_one_rank_goes_on_where_two_stopped(runs, tmp_path):
    jobs = []
    for stage in (2, 3):
        shutil.copytree(runs / f"half{stage}", tmp_path / f"half{stage}")
        shutil.rmtree(tmp_path / f"half{stage}" / f"checkpoint-{STEPS}")
        jobs.append({"folder": str(tmp_path / f"half{stage}"), "deepspeed": f"zero{stage}"})
    done = launch(tmp_path, *jobs, ranks=1)
    assert done.returncode == 0, done.stderr[-4000:]
    for stage in (2, 3):
        folders = (runs / f"zero{stage}", tmp_path / f"half{stage}")
        assert saves.read_run(saves.newest_checkpoint(folders[1]))["world"] == 1
        straight, resumed = (load_file(folder / "model" / "model.safetensors") for folder in folders)
        for name, tensor in straight.items():
            torch.testing.assert_close(resumed[name], tensor, atol=2e-5, rtol=1e-4)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(runs, tmp_path):
    job = {"folder": str(tmp_path / "killed"), "deepspeed": "zero1", "save_every": 5}
    killed = launch(tmp_path, {**job, "kill": 13})
    assert killed.returncode != 0
    assert saves.step_of(saves.newest_checkpoint(tmp_path / "killed")) == 10
    again = launch(tmp_path, job)
    assert again.returncode == 0, again.stderr[-4000:]
    straight, resumed = (load_file(f / "model" / "model.safetensors") for f in (runs / "zero1", tmp_path / "killed"))
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name


def test_the_smoke_recipe_under_deepspeeds_launcher(tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        *(sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", str(free_port())),
        *("--module", "trimode_vlm.training", "--config", "nano-smoke", "--out", str(tmp_path), "--deepspeed", "zero2"),
        *("--ar.optimizer", "adamw", "--joint.optimizer", "adamw", "--ar.steps", "5", "--joint.steps", "5"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=env, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert saves.read_run(saves.newest_checkpoint(tmp_path / "joint"))["world"] == 2
    assert (tmp_path / "joint" / "checkpoint-5" / "global_step5").is_dir(), "DeepSpeed wrote it"
    model, processor = trimode_vlm.load(tmp_path / "model")
    inputs = processor(text="Write the table.", return_tensors="pt")
    assert len(model.generate(**inputs, mode="diffusion", max_new_tokens=4).sequences[0]) > 0


@pytest.fixture(scope="module")
def chat_rows(tmp_path_factory):
    rows = [{"prompt": f"Say {n}", "completion": f"It is {n}."} for n in range(8)]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def test_lora_under_zero_3_is_lora_in_one_process(vlm_folder, chat_rows, tmp_path):  # noqa: F811
    """Text only for a model with a tower, frozen weights cut up over two ranks, stopped and gone on with."""
    options = ["--config", "finetune", "--model", str(vlm_folder), "--data", str(chat_rows), "--steps", "6"]
    options += ["--lora.rank", "2", "--save_every", "3", *FAST]
    assert train([*options, "--out", str(tmp_path / "one")]) == 0
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched += ["-m", "trimode_vlm.training", *options, "--out", str(tmp_path / "two"), "--deepspeed", "zero3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    for _ in range(2):
        done = subprocess.run(launched, env=env, timeout=500, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        first, second = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("one", "two"))
        for name, tensor in first.items():
            torch.testing.assert_close(second[name], tensor, atol=1e-4, rtol=1e-3)
        (saves.newest_checkpoint(tmp_path / "two") / saves.MANIFEST).write_text("{")  # the second launch resumes at 3
