"""From a user's file to a model folder: text and LoRA fine-tuning of Ministral-3 folders that transformers wrote."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from foreign_models import TEXT, VISION, YARN, randomise
from PIL import Image
from processor_cases import MISTRAL, MISTRAL_TOKENS, byte_level
from safetensors.torch import load_file
from test_trainer import log_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

import trimode_vlm
from trimode_vlm.cli import main
from trimode_vlm.training import saves
from trimode_vlm.training.cli import train

FAST = ["--lr", "3e-3", "--batch_samples", "4", "--log_every", "1", "--block_length", "4", "--max_length", "400"]


def ministral_tokenizer():
    """With a reserved token, as the real one has many: it becomes the mask."""
    special = [*MISTRAL_TOKENS, "<SPECIAL_20>"]
    return byte_level(special, MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def sizes(tokenizer):
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {**TEXT, **ids, "vocab_size": len(tokenizer) + 1, "rope_parameters": dict(YARN)}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("ministral3"), ministral_tokenizer()
    randomise(Ministral3ForCausalLM(Ministral3Config(**sizes(tokenizer)))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vlm_folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("mistral3"), ministral_tokenizer()
    config = Mistral3Config(
        text_config={"model_type": "ministral3", **sizes(tokenizer)},
        vision_config=dict(VISION),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    randomise(Mistral3ForConditionalGeneration(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(12)
    ]
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", rows)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for number in range(8):
        Image.new("RGB", (56, 28 * (1 + number % 3)), (30 * number, 0, 0)).save(folder / f"{number}.png")
        answer = {"from": "gpt", "value": f"Red {number}, grün."}
        rows.append(
            {"image": f"{number}.png", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, answer]}
        )
    rows.append({"conversations": [{"from": "human", "value": "No picture"}, {"from": "gpt", "value": "Right."}]})
    return write_rows(folder / "llava.jsonl", rows)


def as_transformers(folder, target, auto):
    assert main(["convert", str(folder), str(target), "--to", "ministral3"]) == 0
    return auto.from_pretrained(target).eval()


def test_a_text_model_learns_a_file_and_opens_everywhere(text_folder, chats, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--model", str(text_folder), "--data", str(chats), "--out", str(out), "--steps", "60", "--train", "text"]
    assert train(["--config", "finetune", *options, *FAST]) == 0
    log = log_of(out)
    assert log[-1]["ar_loss"] < 0.3 * log[0]["ar_loss"] and log[-1]["diff_loss"] < log[0]["diff_loss"]

    model, processor = trimode_vlm.load(out / "model")
    messages = [{"role": "user", "content": "Say 7"}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    answers = {
        mode: model.generate(**inputs, mode=mode, max_new_tokens=12).sequences
        for mode in ("ar", "linear_spec", "diffusion")
    }
    assert torch.equal(answers["ar"], answers["linear_spec"])
    theirs = as_transformers(out / "model", tmp_path / "theirs", AutoModelForCausalLM)
    expected = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert answers["ar"].tolist() == expected.tolist()
    capsys.readouterr()
    assert main(["chat", "--model", str(out / "model"), "--mode", "ar", "--max-new-tokens", "12", "Say 7"]) == 0
    assert "It is" in capsys.readouterr().out


def test_lora_on_a_vlm_merges_into_weights_that_transformers_opens(vlm_folder, pictures, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--model", str(vlm_folder), "--data", str(pictures), "--out", str(out), "--steps", "8"]
    lora = ["--lora.rank", "4", "--lora.alpha", "16", "--train", "projector", "--lr_projector", "1e-3"]
    assert train(["--config", "finetune", *options, *lora, *FAST]) == 0
    assert "by LoRA on 14 layers" in capsys.readouterr().out
    before, after = trimode_vlm.load(vlm_folder)[0], trimode_vlm.load(out / "model")[0]
    changed = {
        name for name, tensor in before.state_dict().items() if not torch.equal(tensor, after.state_dict()[name])
    }
    assert any(".self_attn.q_proj" in name for name in changed) and any("projector" in name for name in changed)
    assert not any("vision_tower" in name or "embed_tokens" in name or "diffusion_head" in name for name in changed)
    theirs = as_transformers(out / "model", tmp_path / "theirs", AutoModelForImageTextToText)
    _, processor = trimode_vlm.load(out / "model")
    content = [{"type": "image", "image": Image.new("RGB", (56, 56))}, {"type": "text", "text": "What is it?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    torch.testing.assert_close(after(**inputs).logits, theirs(**inputs).logits, atol=1e-4, rtol=1e-4)


def test_lora_resumes_bitwise(vlm_folder, pictures, tmp_path):
    options = ["--model", str(vlm_folder), "--data", str(pictures), "--lora.rank", "2", "--lora.dropout", "0.3", *FAST]
    assert train(["--config", "finetune", "--out", str(tmp_path / "a"), "--steps", "6", *options]) == 0
    two = ["--config", "finetune", "--out", str(tmp_path / "b"), "--save_every", "3", *options]
    assert train([*two, "--steps", "6"]) == 0
    last = saves.newest_checkpoint(tmp_path / "b")
    (last / saves.MANIFEST).write_text("{")
    with pytest.warns(UserWarning, match="torn"):
        assert train([*two, "--steps", "6"]) == 0
    for name in ("adapter", "model"):
        first, second = (
            {k: v for f in (tmp_path / run / name).glob("*.safetensors") for k, v in load_file(f).items()}
            for run in "ab"
        )
        assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_evaluation_answers_in_every_mode_and_the_best_is_exported(text_folder, chats, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--model", str(text_folder), "--data", str(chats), "--out", str(out), "--epochs", "2", "--train", "text"]
    options += ["--eval_fraction", "0.25", "--eval_every", "2", "--save_every", "2", "--export", "best"]
    assert train(["--config", "finetune", *options, *FAST]) == 0
    log = log_of(out)
    evaluated = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    assert max(entry["step"] for entry in log) == 5 and set(evaluated) == {2, 4, 5}, "2 epochs of 9 rows by 4"
    best = min(evaluated, key=evaluated.__getitem__)
    exported, checkpoint = (load_file(p / "model.safetensors") for p in (out / "model", out / f"checkpoint-{best}"))
    assert all(torch.equal(exported[name], checkpoint[name]) for name in exported)
    answers = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert [record["step"] for record in answers] == [2, 4, 5]
    assert set(answers[0]["totals"]) == {"ar", "diffusion", "linear_spec"}


def test_no_step_is_missing_in_the_totals(text_folder, chats, tmp_path, capsys):
    """Between two logs the run is saved, stopped, resumed and ended: every sample is counted all the same."""
    options = ["--model", str(text_folder), "--data", str(chats), "--out", str(tmp_path / "run"), "--train", "text"]
    options += [*FAST, "--log_every", "10", "--save_every", "3"]
    for steps in (4, 7):
        assert train(["--config", "finetune", *options, "--steps", str(steps)]) == 0
        log = log_of(tmp_path / "run")
        assert log[-1]["step"] == steps and log[-1]["samples_seen"] == 4 * steps
        assert f" {4 * steps} samples" in capsys.readouterr().err


def test_nothing_but_ours_is_printed(chats, tmp_path):
    """A run and its resumption, each in a process of its own, as DeepSpeed and transformers warn once."""
    command = [sys.executable, "-m", "trimode_vlm.training", "--config", "finetune", "--model", "nano", "--data"]
    command += [str(chats), "--out", str(tmp_path / "run"), "--batch_samples", "2", "--save_every", "1", "--steps"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    for steps in ("1", "2"):
        done = subprocess.run([*command, steps], capture_output=True, text=True, env=environment, check=True)
        assert "WARNING" not in done.stdout + done.stderr and "[transformers]" not in done.stderr
    assert done.stderr.startswith("finetune: resumed at step 1 of 2\n")


def test_the_estimate_counts_the_padding_behind_answers(text_folder, chats, capsys):
    options = ["--config", "finetune", "--model", str(text_folder), "--estimate", *FAST]
    options += ["--data", f"{{path: {chats}, limit: 1}}"]
    found = []
    for padding in ("none", "block"):
        assert train([*options, "--block_length", "64", "--response_padding", padding]) == 0
        found.append(int(re.search(r"= (\d+) noisy", capsys.readouterr().out)[1]))
    assert found[0] < found[1] == 64


def test_the_run_says_how_often_it_goes_through_the_data(text_folder, chats, tmp_path, capsys):
    """Twelve rows by four: steps on the command line stand above epochs in the file."""
    config = tmp_path / "my.yaml"
    config.write_text(f"model: {text_folder}\ndata: {chats}\nout: {tmp_path / 'run'}\nepochs: 3\ntrain: [text]\n")
    assert train(["--config", str(config), *FAST, "--steps", "2"]) == 0
    assert "\n2 steps of 4 samples: 0.667 epochs of 12 samples\n" in capsys.readouterr().out
    assert train(["--config", str(config), *FAST, "--out", str(tmp_path / "whole"), "--epochs", "1"]) == 0
    assert "\n3 steps of 4 samples: 1 epoch of 12 samples\n" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_stop_the_run_or_are_counted(text_folder, tmp_path, capsys, workers):
    good = [{"prompt": f"Say {n}", "completion": f"It is {n}."} for n in range(7)]
    rows = write_rows(tmp_path / "rows.jsonl", [*good, {"id": "odd", "prompt": "Say 8", "completion": ""}])
    options = ["--model", str(text_folder), "--data", str(rows), "--steps", "4", "--train", "text", *FAST]
    options += ["--workers", str(workers)]
    assert train(["--config", "finetune", "--out", str(tmp_path / "raise"), *options]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("trimode-vlm train: ") and "rows.jsonl row 7" in last and "odd" in last
    for policy in ("skip", "report"):
        out = tmp_path / policy
        assert train(["--config", "finetune", "--out", str(out), "--on_bad_sample", policy, *options]) == 0
        assert log_of(out)[-1]["samples_skipped"] == 2, "two epochs of eight rows"
        assert log_of(out)[-1]["samples_seen"] == 16
        assert ("skipped rows.jsonl row 7" in capsys.readouterr().err) == (policy == "report")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "no-such.jsonl"], "no-such.jsonl"),
        (["--chek"], "unknown option --chek; did you mean --check?"),
        (["--train", "head"], "train must be among text, vision, projector, got 'head'"),
        (["--lora.targets", "[nothing]"], "nothing"),
        (["--export", "best"], "export 'best' needs eval_every"),
        (["--epochs", "0"], "epochs must be above 0"),
        (["--packing_length", "20"], "packing_length 20 is below max_length"),
    ],
)
def test_wrong_settings_of_a_fine_tuning_are_one_line(text_folder, chats, tmp_path, capsys, options, words):
    base = ["--config", "finetune", "--model", str(text_folder), "--data", str(chats), "--out", str(tmp_path / "out")]
    assert train([*base, *options]) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()
    assert words in error[-1] and error[-1].startswith("trimode-vlm train: ")
