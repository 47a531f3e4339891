"""The training callbacks in a real transformers Trainer: progress, log file, generations, reports, stall watch."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import REPOSITORY, make_tiny_model
from torch import nn
from watch_cases import Clock, Toy, toy_trainer

from trimode_vlm.training import callbacks, generations, progress
from trimode_vlm.training.callbacks import LogFile, SampleGenerations, StallWatch, TrainingProgress, check_report_to
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.objective import Counts
from trimode_vlm.training.run_log import RunLog, read_log
from trimode_vlm.training.watch import Watchdog, not_finite_message, stall_message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- progress -------------------------------------------------------------------------------------------------------


def test_without_a_terminal_every_logged_step_is_one_plain_line_and_a_summary_ends_the_run(tmp_path):
    out = io.StringIO()
    shown = TrainingProgress(tmp_path, stream=out, clock=Clock(tick=10))
    toy_trainer(tmp_path, [shown], logging_steps=2, eval_strategy="steps", eval_steps=3).train()
    text = out.getvalue().splitlines()
    assert "\r" not in out.getvalue() and len(text) == 3 + 2 + 4
    # 20 s for 2 of 6 steps at the first line: 10 s of them before the first log, tqdm expects twice as long again.
    assert text[0] == ("train: step 2/6, AR 2, diffusion 4, masked accuracy 0.5, 1,234 tokens/s [00:10<00:20]")
    assert re.fullmatch(r"train, step 3: eval_loss [\d.]+", text[1])
    assert text[-4] == "trained: 6 steps, 12 samples, 600 tokens, wall time 00:40, 1,234 tokens/s in training steps"
    assert text[-3] == "  last: AR 0.6667, diffusion 1.333, masked accuracy 0.8333"
    losses = [float(line.rsplit(" ", 1)[1]) for line in text if "eval_loss" in line and line.startswith("train,")]
    assert re.fullmatch(r"  best eval_loss: [\d.]+ at step [36]", text[-2])
    assert float(text[-2].split()[2]) == min(losses)
    assert text[-1] == f"  folder: {tmp_path}"


def test_a_terminal_gets_one_bar_with_the_loss_terms_in_place_of_transformers_own(tmp_path, capsys):
    out = Terminal()
    trainer = toy_trainer(tmp_path, [TrainingProgress(tmp_path, stream=out)], eval_strategy="steps", eval_steps=3)
    trainer.train()
    frames = out.getvalue().split("\r")
    assert any("6/6" in frame and "AR 0.6667" in frame and "tokens/s" in frame for frame in frames), frames[-5:]
    kept = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert transformers.ProgressCallback not in kept and transformers.PrinterCallback not in kept
    seen = capsys.readouterr()
    assert "{'loss'" not in seen.out + seen.err and "%|" not in seen.err, "transformers' own bar or printer"


def test_a_resumed_run_counts_from_the_step_it_resumed_at(tmp_path):
    toy_trainer(tmp_path, [], max_steps=4, save_strategy="steps", save_steps=4).train()
    out = io.StringIO()
    trainer = toy_trainer(tmp_path, [TrainingProgress(tmp_path, stream=out, clock=Clock(tick=1))])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    text = out.getvalue().splitlines()
    assert text[0] == "train: resumed at step 4 of 6"
    assert text[1].startswith("train: step 5/6")
    last = "trained: 6 steps (2 in this session), 12 samples, 600 tokens, wall time 00:03, 1,234 tokens/s in training"
    assert any(line.startswith(last) for line in text), text


def test_only_rank_zero_speaks_and_writes(tmp_path, monkeypatch):
    out = Terminal()
    trainer = toy_trainer(tmp_path, [TrainingProgress(tmp_path, stream=out), LogFile(tmp_path)])
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    trainer.train()
    assert out.getvalue() == "" and not (tmp_path / "log.jsonl").exists()


def test_the_speed_of_a_session_is_that_of_its_steps():
    history = [
        {"step": 1, "tokens_seen": 1000, "tokens_per_sec": 1.0},
        {"step": 2, "tokens_seen": 1100, "tokens_per_sec": 50.0},
        {"step": 2, "eval_loss": 1.0},
        {"step": 3, "tokens_seen": 1400, "tokens_per_sec": 100.0},
    ]
    assert progress.training_speed(history, 1) == 400 / 5
    assert (
        progress.training_speed(history, 3) is None and progress.training_speed([{"step": 1, "loss": 1.0}], 0) is None
    )


def test_metrics_are_ratios_of_sums():
    counts = Counts(num_supervised=10, num_maskable=20, num_masked=5, num_sequences=2)
    metrics = progress.metrics_from((30.0, 50.0, 8.0, 4.0), counts, 2.0, num_tokens=100)
    assert metrics == {
        "ar_loss": 3.0, "ar_accuracy": 0.8, "diff_loss": 2.5, "masked_accuracy": 0.8, "mask_ratio": 0.25,
        "supervised_tokens": 10, "masked_tokens": 5, "tokens_per_sec": 50.0,
    }  # fmt: skip
    assert progress.metrics_from((30.0, 50.0, 8.0, 4.0), counts, 2.0, averaging="masked")["diff_loss"] == 10.0
    only_ar = progress.metrics_from((30.0, 0.0, 8.0, 0.0), Counts(num_supervised=10), 0.0)
    assert "diff_loss" not in only_ar and "mask_ratio" not in only_ar and only_ar["tokens_per_sec"] == 0.0


# --- log file -------------------------------------------------------------------------------------------------------


def test_the_log_has_one_object_per_step_and_evaluation(tmp_path):
    toy_trainer(tmp_path, [LogFile(tmp_path, clock=Clock(tick=1))], eval_strategy="steps", eval_steps=3).train()
    records = lines(tmp_path / "log.jsonl")
    steps = [record for record in records if "ar_loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "eval_loss" in record] == [3, 6]
    assert len(records) == 8, "transformers' closing log (train_runtime) is no step"
    wanted = {"ar_loss", "diff_loss", "masked_accuracy", "mask_ratio", "tokens_per_sec", "grad_norm", "learning_rate"}
    assert all(wanted <= record.keys() for record in steps)
    elapsed = [record["elapsed_sec"] for record in records]
    assert elapsed == sorted(elapsed) and elapsed[0] > 0


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "ar_lo', b'\x00\x00\n{"step": 6}'])
def test_a_resume_neither_repeats_nor_loses_a_step(tmp_path, torn, recwarn):
    straight = toy_trainer(tmp_path / "a", [LogFile(tmp_path / "a")], eval_strategy="steps", eval_steps=2)
    straight.train()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    toy_trainer(tmp_path / "b", [LogFile(tmp_path / "b")], max_steps=5, **options).train()
    with open(tmp_path / "b" / "log.jsonl", "ab") as file:
        file.write(torn)
    resumed = toy_trainer(tmp_path / "b", [LogFile(tmp_path / "b")], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    logs = [
        [(record["step"], record.get("loss"), record.get("eval_loss")) for record in lines(tmp_path / x / "log.jsonl")]
        for x in "ab"
    ]
    assert [step for step, _, _ in logs[1]] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert logs[0] == logs[1]


def test_a_start_from_nothing_begins_an_empty_log(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 0, "eval_loss": 99.0}\n{"step": 2, "ar_loss": 99.0}\n')
    for _ in range(2):
        toy_trainer(tmp_path, [LogFile(tmp_path)], eval_on_start=True, eval_strategy="steps", eval_steps=6).train()
    assert "99.0" not in (tmp_path / "log.jsonl").read_text()
    assert [record["step"] for record in lines(tmp_path / "log.jsonl")] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_elapsed_time_goes_on_after_a_resume(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 3, "ar_loss": 1.0, "elapsed_sec": 500.0}\n')
    toy_trainer(tmp_path, [], max_steps=3, save_strategy="steps", save_steps=3).train()
    trainer = toy_trainer(tmp_path, [LogFile(tmp_path, clock=Clock(tick=1))])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [(r["step"], r["elapsed_sec"]) for r in lines(log)] == [(3, 500.0), (4, 501.0), (5, 502.0), (6, 503.0)]


def test_what_json_lacks_becomes_null_and_tensors_become_numbers(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    log.start(0)
    log.append({"step": 1, "grad_norm": float("inf"), "ar_loss": torch.tensor(2.5), "nested": {"x": [float("nan")]}})
    assert lines(tmp_path / "log.jsonl") == [{"step": 1, "grad_norm": None, "ar_loss": 2.5, "nested": {"x": [None]}}]


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "log.jsonl")
    log.start(0)
    log.append({"step": 1})
    opened = open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, line):
            return self.file.write(line[: len(line) // 2])

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr("builtins.open", lambda *args, **options: Full(opened(*args, **options)))
    with pytest.raises(OSError, match="disk full"):
        log.append({"step": 2})
    monkeypatch.undo()
    assert log.append({"step": 2}) and [record["step"] for record in lines(tmp_path / "log.jsonl")] == [1, 2]


WRITER = """
import sys
from pathlib import Path
from trimode_vlm.training.run_log import RunLog
log = RunLog(Path(sys.argv[1]))
log.start(0)
step = 0
while True:
    step += 1
    log.append({"step": step, "text": "x" * 5000})
    if step == 200:
        print("many lines", flush=True)
"""


def test_a_killed_writer_loses_no_more_than_its_last_line(tmp_path):
    """The kernel may end a write between two pages, so the last line can be torn; a resume drops that one."""
    path = tmp_path / "log.jsonl"
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "many lines\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    whole = path.read_bytes().count(b"\n")
    assert whole >= 200
    assert [record["step"] for record in read_log(path)] == list(range(1, whole + 1))
    log = RunLog(path)
    log.start(whole)
    log.append({"step": whole + 1})
    assert path.read_bytes().endswith(b"\n")
    assert [record["step"] for record in lines(path)] == list(range(1, whole + 2))


# --- trackers -------------------------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_there_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard is not installed \(pip install 'trimode-vlm\[train\]'\)"):
        check_report_to("tensorboard")
    with pytest.raises(ValueError, match=r"wandb is not installed \(pip install wandb\)"):
        check_report_to(["none", "wandb"])
    with pytest.raises(ValueError, match="must name tensorboard, wandb or none, got 'tensorbord'"):
        check_report_to("tensorbord")
    assert check_report_to(None) == check_report_to("none") == check_report_to([]) == []


def test_the_extra_that_a_message_names_holds_the_package():
    import tomllib

    from trimode_vlm.training.curves import NO_MATPLOTLIB

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, text in (("tensorboard", callbacks.REPORTERS["tensorboard"]), ("matplotlib", NO_MATPLOTLIB)):
        extra = re.search(r"trimode-vlm\[(\w+)\]", text)[1]
        assert any(requirement.startswith(package) for requirement in extras[extra])


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report_to = check_report_to("tensorboard")
    toy_trainer(tmp_path, [], report_to=report_to, eval_strategy="steps", eval_steps=3).train()
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/ar_loss")] == [1, 2, 3, 4, 5, 6]
    assert {"train/diff_loss", "train/masked_accuracy", "train/tokens_per_sec", "eval/loss"} <= set(
        events.Tags()["scalars"]
    )


# --- generations ----------------------------------------------------------------------------------------------------


class Host(nn.Module):
    """A tri-mode model with a loss, as transformers' Trainer wants it, under a wrapper as DDP has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        # Dropout draws from the global generator, so that anything else that does shows in the weights.
        logits = nn.functional.dropout(self.module(input_ids=x).logits, 0.1, self.training)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def make_host(tokenizer: Any, **overrides: Any) -> Host:
    """A model of the tokenizer's ids; each call gives the same weights."""
    ids = tokenizer.convert_tokens_to_ids
    fields = {
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id, "mask_token_id": tokenizer.mask_token_id,
        "image_token_id": ids("<|image_pad|>"), "image_start_token_id": ids("<|image_start|>"),
        "image_break_token_id": ids("<|image_break|>"), "image_end_token_id": ids("<|image_end|>"),
    }  # fmt: skip
    return Host(make_tiny_model(**{**fields, **overrides}))


def text_trainer(folder: Path, host: Host, watchers: list[Any]) -> transformers.Trainer:
    """Four steps on random ids, an evaluation after the second and the fourth."""
    ids = torch.randint(20, 60, (32, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"x": row, "labels": row} for row in ids]
    return toy_trainer(folder, watchers, host, rows, max_steps=4, eval_strategy="steps", eval_steps=2)


def prompts(processor: Any) -> list[generations.EvalPrompt]:
    from PIL import Image

    picture = {"type": "image", "image": Image.new("RGB", (56, 28), "red")}
    chats = {
        "text": [{"role": "user", "content": "What now?"}, {"role": "assistant", "content": "Nothing."}],
        "picture": [{"role": "user", "content": [picture, {"type": "text", "text": "Which colour?"}]}],
    }
    found = []
    for name, (question, *answer) in chats.items():
        inputs = processor.apply_chat_template(
            [question], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        expected = answer[0]["content"] if answer else None
        found.append(generations.EvalPrompt(name=name, inputs=dict(inputs), expected=expected))
    return found


def test_an_evaluation_answers_in_every_mode_and_training_goes_on_as_without_it(tmp_path, processor, capsys):
    watcher = SampleGenerations(tmp_path / "a", prompts(processor), processor, max_new_tokens=120)
    hosts = [make_host(processor.tokenizer) for _ in range(2)]
    trained_in = []
    hosts[0].register_forward_hook(lambda module, *_: trained_in.append(module.module.training))
    text_trainer(tmp_path / "a", hosts[0], [watcher]).train()
    text_trainer(tmp_path / "b", hosts[1], []).train()
    for (name, ours), (_, plain) in zip(hosts[0].named_parameters(), hosts[1].named_parameters(), strict=True):
        assert torch.equal(ours, plain), f"{name}: generating changed the training"
    assert trained_in.count(True) == 4, "every step trains in train mode"

    records = lines(tmp_path / "a" / "generations.jsonl")
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        assert [answer["prompt"] for answer in record["answers"]] == ["text", "picture"]
        assert [answer["expected"] for answer in record["answers"]] == ["Nothing.", None]
        for answer in record["answers"]:
            assert set(answer["modes"]) == {"ar", "diffusion", "linear_spec"} and answer["linear_spec_is_ar"] is True
            assert answer["modes"]["ar"]["tpf"] == 1.0 and answer["modes"]["ar"]["tokens"] >= 1
        ar, spec = record["totals"]["ar"], record["totals"]["linear_spec"]
        assert ar["all"]["tokens"] == spec["all"]["tokens"] and ar["all"]["tpf"] == 1.0
    # What the last line says is what the trained model says now.
    prompt = prompts(processor)[1]
    ids = hosts[0].module.eval().generate(**prompt.inputs, mode="ar", max_new_tokens=120).sequences[0]
    answer = records[-1]["answers"][1]["modes"]["ar"]
    assert answer["token_ids"] == ids[prompt.inputs["input_ids"].shape[1] :].tolist()
    assert answer["text"] == processor.decode(answer["token_ids"], skip_special_tokens=True)
    shown = capsys.readouterr().err
    assert "TPF >100" in shown and "2 of 2" in shown and "(expected: Nothing.)" in shown


def test_tokens_per_forward_are_pooled_and_bucketed_by_length():
    answers = [
        {"tokens": 1, "forwards": 1, "prefill_forwards": 1},
        {"tokens": 101, "forwards": 11, "prefill_forwards": 1},
        {"tokens": 201, "forwards": 101, "prefill_forwards": 1},
        {"error": "too long"},
    ]
    totals = generations.bucketed_tpf(answers)
    assert {name: total["answers"] for name, total in totals.items()} == {"all": 3, ">100": 2, ">200": 1}
    assert totals["all"]["tpf"] == 300 / 110 and totals[">100"]["tpf"] == 300 / 110 and totals[">200"]["tpf"] == 2.0
    assert generations.bucketed_tpf(answers[:1])["all"]["tpf"] is None


def test_the_flag_tells_when_speculation_is_not_exact(tmp_path, processor, monkeypatch):
    host = make_host(processor.tokenizer)
    generate = host.module.generate

    def wrong(**options):
        out = generate(**options)
        if options["mode"] == "linear_spec":
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(host.module, "generate", wrong)
    record = generations.generate_all(host, processor, prompts(processor), max_new_tokens=8)
    assert [answer["linear_spec_is_ar"] for answer in record["answers"]] == [False, False]
    assert "0 of 2" in generations.report(1, record)


def test_a_prompt_that_a_mode_refuses_is_reported_and_the_run_goes_on(tmp_path, processor, capsys):
    host = make_host(processor.tokenizer, mask_token_id=None)
    text_trainer(tmp_path, host, [SampleGenerations(tmp_path, prompts(processor), processor, max_new_tokens=4)]).train()
    record = lines(tmp_path / "generations.jsonl")[-1]
    assert record["step"] == 4 and "mask token" in record["answers"][0]["modes"]["diffusion"]["error"]
    assert "text" in record["answers"][0]["modes"]["ar"] and "mask token" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown mode 'difusion'"):
        SampleGenerations(tmp_path, [], processor, modes=("ar", "difusion"))


def test_flags_of_single_modules_come_back_and_an_adapter_stays_on(processor):
    from peft import LoraConfig, get_peft_model

    model = make_host(processor.tokenizer).module
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.train()
    model.encoder.vision_tower.eval()  # a frozen tower
    before = [module.training for module in adapted.modules()]
    record = generations.generate_all(adapted, processor, prompts(processor), ("ar",), max_new_tokens=8)
    assert [module.training for module in adapted.modules()] == before and not all(before)
    with adapted.disable_adapter():
        plain = generations.generate_all(adapted, processor, prompts(processor), ("ar",), max_new_tokens=8)
    ids = [[answer["modes"]["ar"]["token_ids"] for answer in r["answers"]] for r in (record, plain)]
    assert ids[0] != ids[1]


def test_the_ranks_that_generate(tmp_path, processor, monkeypatch):
    """Rank 1 answers only under ZeRO 3, and writes nothing in either case."""
    made = []
    monkeypatch.setattr(
        generations, "generate_all", lambda *_, **__: made.append(True) or {"answers": [], "totals": {}}
    )
    for is_partitioned in (False, True):
        watcher = SampleGenerations(tmp_path, prompts(processor), processor)
        host = make_host(processor.tokenizer)
        if is_partitioned:
            next(host.parameters()).ds_id = 0  # DeepSpeed's mark
        trainer = text_trainer(tmp_path, host, [watcher])
        monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
        trainer.train()
        assert made == [True, True] * is_partitioned
    assert not (tmp_path / "generations.jsonl").exists()


ZERO_3 = """
import sys, torch
from pathlib import Path
from test_callbacks import Digits
from training_cases import MIXED, sample, tiny_model
from trimode_vlm.training import distributed
from trimode_vlm.training.callbacks import SampleGenerations
from trimode_vlm.training.data import ListSource
from trimode_vlm.training.generations import prompt_from_sample
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import TriModeTrainer

folder = Path(sys.argv[1])
distributed.start()
torch.set_num_threads(1)
model = tiny_model()
prompts = [prompt_from_sample(s, Digits(), model.config) for s in MIXED[:2]]
settings = TrainSettings(
    steps=2, lr=1e-2, block_length=4, micro_batch_tokens=None, log_every=1, eval_every=2, deepspeed="zero3"
)
texts = [ListSource([sample(n) for n in range(start, start + 4)], batch_samples=4) for start in (10, 20)]
watcher = SampleGenerations(folder, prompts, Digits(), max_new_tokens=20)
trainer = TriModeTrainer(model, texts[0], settings, folder, eval_source=texts[1], callbacks=[watcher])
trainer.fit()
trainer.save_model(str(folder / "model"))
distributed.stop()
"""


class Digits:
    """As much of a processor as generations need: ids as digits."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def test_two_ranks_under_zero_3_answer_as_the_saved_model_does(tmp_path):
    pytest.importorskip("deepspeed")
    from safetensors.torch import load_file
    from training_cases import MIXED, tiny_model

    script = tmp_path / "run.py"
    script.write_text(ZERO_3)
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent))), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path]
    done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (record,) = lines(tmp_path / "generations.jsonl")
    model = tiny_model()
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    prompts_ = [generations.prompt_from_sample(sample, Digits(), model.config) for sample in MIXED[:2]]
    alone = generations.generate_all(model, Digits(), prompts_, max_new_tokens=20)
    for ours, there in zip(alone["answers"], record["answers"], strict=True):
        for mode, answer in ours["modes"].items():
            assert there["modes"][mode]["token_ids"] == answer["token_ids"], mode
    assert record["step"] == 2 and any(len(a["modes"]["ar"]["token_ids"]) > 1 for a in record["answers"])


def test_a_prompt_is_what_stands_before_the_first_trained_token(processor, tokenizer):
    config = make_host(tokenizer).module.config
    pad, end = config.image_token_id, config.image_end_token_id
    image = lambda columns: torch.rand(3, 28, 28 * columns)  # noqa: E731
    answer = tokenizer("yes it is", add_special_tokens=False)["input_ids"]
    first = [config.image_start_token_id, pad, pad, end, 20, 21]
    second = [config.image_start_token_id, pad, end, 22]
    sample = Encoded(
        sample_id=7, name="train.jsonl row 8", input_ids=[*first, *answer, *second, 23, 24],
        loss_mask=[False] * len(first) + [True] * len(answer) + [False] * len(second) + [True] * 2,
        images=[image(2), image(1)],
    )  # fmt: skip
    prompt = generations.prompt_from_sample(sample, processor, config)
    assert prompt.name == "train.jsonl row 8" and prompt.expected == "yes it is"
    assert prompt.inputs["input_ids"].tolist() == [first]
    assert torch.equal(prompt.inputs["pixel_values"][0], sample.images[0]) and len(prompt.inputs["pixel_values"]) == 1
    assert prompt.inputs["image_sizes"].tolist() == [[28, 56]]
    text = Encoded(sample_id=9, input_ids=list(range(20, 40)), loss_mask=[False] + [True] * 19)
    prompt = generations.prompt_from_sample(text, processor, config)
    assert prompt.inputs["input_ids"].tolist() == [[20, 21, 22, 23, 24]] and set(prompt.inputs) == {"input_ids"}
    assert prompt.name == "sample 9"


# --- stalls and losses that are not finite --------------------------------------------------------------------------


def test_messages_name_step_samples_and_what_to_try():
    text = not_finite_message(12, ["a.jsonl row 3", "a.jsonl row 9"], "the diffusion loss")
    assert "the diffusion loss is not finite at step 12" in text and "a.jsonl row 3, a.jsonl row 9" in text
    assert all(hint in text for hint in ("lower lr", "bf16 instead of fp16", "trimode-vlm inspect"))
    text = stall_message(5, range(20), 1800, rank=3, place="data.py:1 in draw", dump=Path("stall.txt"))
    assert (
        "rank 3: no step ended for 30 minutes" in text and "step 5" in text and "0, 1, 2, 3, 4, 5, 6, 7 and 12" in text
    )
    assert all(hint in text for hint in ("NCCL_DEBUG", "data folder", "fewer data workers", "stall_minutes"))
    assert "\n" not in text and "samples unknown" in stall_message(5, [], 60)


def test_the_watchdog_barks_once_and_only_without_beats():
    clock, stalls, barked = Clock(), [], threading.Event()
    dog = Watchdog(100, lambda idle: (stalls.append(idle), barked.set()), clock=clock, poll_sec=0.001)
    clock.now = 50.0
    dog.start()
    for _ in range(10):
        clock.now += 99
        dog.beat()
    assert not stalls
    clock.now += 101
    assert barked.wait(60)
    dog.stop()
    assert stalls == [101.0] and not dog._thread.is_alive()


def test_an_ordinary_run_is_not_stopped_and_the_watch_ends_with_it(tmp_path):
    """Six steps of 1000 s each under a limit of 1800 s."""
    clock, stopped, polled = Clock(), [], threading.Event()

    class Slow(Toy):
        def forward(self, x, labels):
            clock.now += 1000
            polled.clear()
            assert polled.wait(60), "the watch looked at the clock meanwhile"
            return super().forward(x, labels)

    def looked_at() -> float:
        if threading.current_thread().name == "stall watch":
            polled.set()
        return clock.now

    others = set(threading.enumerate())  # what other tests have left in this process
    watch = StallWatch(tmp_path, clock=looked_at, poll_sec=0.001, stop_process=stopped.append)
    toy_trainer(tmp_path, [watch], Slow()).train()
    assert clock.now == 6000 and stopped == []
    left = set(threading.enumerate()) - others
    assert watch.watchdog is None and not any(thread.name == "stall watch" for thread in left)
    off = StallWatch(tmp_path, 0)
    toy_trainer(tmp_path, [off]).train()
    assert off.watchdog is None


def test_a_run_that_ended_in_an_exception_is_not_stopped_afterwards(tmp_path):
    """A notebook whose cell was interrupted must live on, even if nobody called stop()."""
    clock, stopped = Clock(), []
    watch = StallWatch(tmp_path, clock=clock, poll_sec=0.001, stop_process=stopped.append)

    class Broken(Toy):
        def forward(self, x, labels):
            raise FloatingPointError("nan")

    with pytest.raises(FloatingPointError):
        toy_trainer(tmp_path, [watch], Broken()).train()
    clock.now += 1e6
    assert watch.watchdog is not None
    watch.watchdog._thread.join(60)
    assert not watch.watchdog._thread.is_alive() and stopped == []


STALLING = """
import sys, threading, time
from pathlib import Path
from watch_cases import Clock, Toy, toy_trainer
from trimode_vlm.training.callbacks import LogFile, StallWatch

folder, clock = Path(sys.argv[1]), Clock()
watch = StallWatch(folder, stall_minutes=30, clock=clock, poll_sec=0.01)

class Stuck(Toy):
    steps = 0
    def forward(self, x, labels):
        Stuck.steps += 1
        watch.running([f"train.jsonl row {Stuck.steps}"])
        if Stuck.steps == 3:
            clock.now += 1801
            wait_for_a_rank_that_never_comes()
        return super().forward(x, labels)

def wait_for_a_rank_that_never_comes():
    threading.Event().wait()

toy_trainer(folder, [watch, LogFile(folder)], Stuck()).train()
"""


def test_a_stall_stops_the_process_with_step_samples_and_stacks(tmp_path):
    script = tmp_path / "stalling.py"
    script.write_text(STALLING)
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, tmp_path], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("rank 0: no step ended for 30")]
    assert "Running: step 3, samples train.jsonl row 3." in message and "NCCL_DEBUG" in message
    assert "in wait_for_a_rank_that_never_comes" in message and "Traceback" not in done.stderr
    assert "wait_for_a_rank_that_never_comes" in (tmp_path / "stall-rank0.txt").read_text()
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [1, 2]
