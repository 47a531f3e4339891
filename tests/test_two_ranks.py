"""Two gloo ranks under DDP: as many micro-batches, samples or nans on one of them as on the other, or not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import SAMPLES, log_of, trainer

from trimode_vlm.training import distributed
from trimode_vlm.training.data import ListSource

JOBS = {
    "even": dict(batch_samples=4),
    "one rank has two micro-batches, the other one": dict(batch_samples=3, micro_batch_samples=1),
    "one rank has no sample": dict(batch_samples=1),
}


def job(folder, name):
    options = dict(JOBS[name])
    source = ListSource(SAMPLES, batch_samples=options.pop("batch_samples"))
    # So tight a clip that AdamW's epsilon counts: the update shows the size of the gradient, not its sign alone.
    return trainer(folder / name, source, dtype=torch.float64, until=4, grad_clip=1e-7, **options)


def run_jobs(folder):
    torch.set_num_threads(1)
    distributed.start()
    for name in JOBS:
        job(folder, name).fit()
    broken = replace(SAMPLES[1], images=[image * float("nan") for image in SAMPLES[1].images], name="the odd one")
    t = trainer(folder / "nan", ListSource([SAMPLES[0], broken], batch_samples=2), steps=1)
    try:
        t.fit()
    except FloatingPointError as error:
        (folder / f"nan-{distributed.rank()}.txt").write_text(str(error))
    distributed.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parent
    script = folder / "two.py"
    script.write_text(
        f"from pathlib import Path\nfrom test_two_ranks import run_jobs\nrun_jobs(Path({str(folder)!r}))\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=env, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_log_the_losses_and_gradients_of_one(runs, tmp_path, name):
    job(tmp_path, name).fit()
    one, two = log_of(tmp_path / name), log_of(runs / name)
    assert len(one) == 4
    for key in ("ar_loss", "diff_loss", "grad_norm", "learning_rate", "samples_seen", "tokens_seen"):
        values = [[entry[key] for entry in log] for log in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-6), key


def test_a_nan_of_one_rank_stops_both_and_names_its_sample(runs):
    messages = [(runs / f"nan-{rank}.txt").read_text() for rank in (0, 1)]
    assert all("not finite at step 1" in message for message in messages)
    told = [message for message in messages if message.startswith("this rank's loss")]
    assert len(told) == 1 and "the odd one" in told[0]
