"""How the learned sampler is made: trajectories against a cacheless decode, shards, the fit, the recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import Oracle
from safetensors.torch import load_file
from test_draft_lora import chats  # noqa: F401 - a fixture
from torch import Tensor
from training_cases import EOS, MASK, MIXED, sample, tiny_model

import trimode_vlm
from trimode_vlm.learned_sampler import SamplerConfig, look
from trimode_vlm.training.blocks import response_runs
from trimode_vlm.training.cli import train
from trimode_vlm.training.data import Encoded, ListSource
from trimode_vlm.training.learned_sampler_fit import FitSettings, batch_of, fit, split_by_prompt
from trimode_vlm.training.learned_sampler_trajectories import (
    POLICIES,
    Collection,
    States,
    collect,
    read_shards,
    shard_path,
    walk,
)
from trimode_vlm.vision.images import pad_pixels

K = 4
HOW = Collection(block_length=K, states_per_block=99, batch_blocks=3, seed=0, end_token_ids=[EOS])
TINY = SamplerConfig(block_length=8, pca_width=3, num_layers=2, width=32, ffn_width=64, num_heads=2)


# Trajectories.


class Naive:
    """Blocks of one sample without a cache, one canvas at a time."""

    def __init__(self, model: Any, s: Encoded) -> None:
        images = {}
        if s.images:
            sizes = torch.tensor([pixels.shape[-2:] for pixels in s.images])
            images = {"pixel_values": pad_pixels(s.images), "image_sizes": sizes}
        self.oracle, self.ids = Oracle(model, [EOS], model.config.banned_ids([EOS]), images), s.input_ids

    def logits(self, start: int, canvas: list[int]) -> Tensor:
        return self.oracle.logits(self.ids[:start] + canvas, block_start=start)[start:]

    def walk(self, start: int, truth: list[int | None] | None) -> list[list[int]]:
        """All canvases, the full one last: serially, or committing with the surest all that is true."""
        canvas = [self.ids[start]] + [MASK] * (K - 1)
        seen = [list(canvas)]
        while MASK in canvas:
            sure, token = (column.tolist() for column in self.logits(start, canvas).softmax(-1).max(-1))
            masked = [i for i in range(K) if canvas[i] == MASK]
            chosen = [max(masked, key=lambda i: (sure[i], -i))]
            if truth is not None:
                chosen += [i for i in masked if truth[i] in (None, token[i])]
            for i in chosen:
                canvas[i] = token[i]
            seen.append(list(canvas))
        return seen


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_states_and_targets_are_those_of_a_naive_decode(number: int) -> None:
    """Images, several answers, answers that end within a block and on its border."""
    model, s = tiny_model().eval(), MIXED[number]
    naive, states = Naive(model, s), walk(model, [s], HOW)
    assert states["prompt"].unique().numel() == 1
    place = 0
    starts = [(a, end) for first, end in response_runs(torch.tensor(s.loss_mask)) for a in range(first, end, K)]
    assert states["start"].unique().tolist() == [start for start, _ in starts]
    for start, end in starts:
        truth = [*s.input_ids[start : min(end, start + K)], *[None] * K][:K]
        serial = naive.walk(start, None)
        for policy, seen in ((0, serial[:-1]), (1, naive.walk(start, truth)[1:-1])):
            mine = (states["start"] == start) & (states["policy"] == policy)
            assert states["canvas"][mine].tolist() == seen, POLICIES[policy]
            assert (states["target"][mine] == torch.tensor(serial[-1])).all()
            for i, canvas in zip(mine.nonzero()[:, 0].tolist(), seen, strict=True):
                ids, scalars = look(naive.logits(start, canvas))
                assert states["masked"][i].tolist() == [token == MASK for token in canvas]
                assert states["top_ids"][i].tolist() == ids.tolist()
                torch.testing.assert_close(states["scalars"][i], scalars, atol=1e-4, rtol=1e-4)
            place += len(seen)
    assert place == len(states["start"])


def test_samples_walked_together_give_what_they_give_alone_and_leave_the_model_as_it_is() -> None:
    model = tiny_model().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keys = ("prompt", "start", "policy", "step")

    def by_key(states: States) -> dict[tuple[int, ...], list[list[int]]]:
        rows = zip(*(states[name].tolist() for name in keys), strict=True)
        kept = torch.cat([states["canvas"], states["target"], states["top_ids"].flatten(1)], 1).tolist()
        return dict(zip(rows, kept, strict=True))

    alone: dict[tuple[int, ...], list[list[int]]] = {}
    for s in MIXED:
        alone |= by_key(walk(model, [s], replace(HOW, batch_blocks=1)))
    assert by_key(walk(model, MIXED, replace(HOW, batch_blocks=5))) == alone
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_few_states_of_a_block_are_kept_and_the_first_always() -> None:
    model = tiny_model().eval()
    states = walk(model, MIXED, replace(HOW, states_per_block=2))
    keys = [
        tuple(states[name][i].tolist() for name in ("prompt", "start", "policy")) for i in range(len(states["start"]))
    ]
    steps: dict[Any, list[int]] = {}
    for key, step in zip(keys, states["step"].tolist(), strict=True):
        steps.setdefault(key, []).append(step)
    serial = [found for key, found in steps.items() if key[2] == 0]
    assert all(found[0] == 0 and len(found) == 2 for found in serial)
    assert {found[1] for found in serial} == {1, 2}, "drawn anew for every block"
    assert max(map(len, steps.values())) == 2


# Shards.


def shards(folder: Path, numbers: Any = range(3), made_by: str = "a", limit: int | None = 5) -> Any:
    source = ListSource([replace(s, sample_id=i) for i, s in enumerate([*MIXED, sample(9)])], 2)
    return collect(tiny_model().eval(), source, folder, list(numbers), HOW, made_by, limit)


def test_a_killed_collection_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    counts = dict(shards(whole))
    assert len(counts) == 3 and all(counts.values())
    started = shards(cut)
    next(started), next(started)
    started.close()
    (cut / "shard-00002.tmp").write_bytes(b"half")  # the kill came while it was written
    torn = shard_path(cut, 0)
    torn.write_bytes(torn.read_bytes()[:-100])
    kept = shard_path(cut, 1).stat().st_mtime_ns
    with pytest.warns(UserWarning, match="shard-00000.safetensors: a torn shard, not used"):
        assert [num > 0 for _, num in shards(cut)] == [True, False, True]
    assert shard_path(cut, 1).stat().st_mtime_ns == kept
    assert [path.name for path in sorted(cut.iterdir())] == [path.name for path in sorted(whole.iterdir())]
    assert all((cut / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
    states = read_shards(cut, "a")
    keys = torch.stack([states[name].long() for name in ("prompt", "start", "policy", "step")], 1)
    assert len(keys) == sum(counts.values()) and len(keys[:, 0].unique()) == 5
    assert len(keys.unique(dim=0)) == len(keys), "behind the limit the samples come again"


def test_torn_shards_are_not_read_and_those_of_other_settings_refused(tmp_path: Path) -> None:
    list(shards(tmp_path))
    number = len(read_shards(tmp_path, "a")["start"])
    path = shard_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.warns(UserWarning, match="torn"):
        assert 0 < len(read_shards(tmp_path, "a")["start"]) < number
    with pytest.raises(ValueError, match="shard-00000.safetensors was made by other settings"):
        list(shards(tmp_path, made_by="b"))
    with pytest.raises(ValueError, match="no trajectories"):
        read_shards(tmp_path / "none", "a")


# The fit.


def planted(num: int = 600) -> tuple[States, Tensor]:
    """States whose likeliest tokens are final where the block's last position is committed; nothing else tells."""
    generator = torch.Generator().manual_seed(0)
    masked = torch.rand(num, 8, generator=generator) < 0.5
    masked[:, 0] = False
    top_ids = torch.randint(0, 20, (num, 8, 3), generator=generator)
    target = torch.where(~masked[:, -1:], top_ids[..., 0], top_ids[..., 0] + 1)
    scalars = torch.rand(num, 8, 4, generator=generator)
    table = torch.randn(30, TINY.pca_width, generator=generator)
    canvas = torch.where(masked, 29, top_ids[..., 0])
    prompt = torch.arange(num) // 4
    return {"top_ids": top_ids, "scalars": scalars, "canvas": canvas, "masked": masked, "target": target,
            "prompt": prompt}, table  # fmt: skip


def accuracy(network: Any, states: States, table: Tensor) -> float:
    read, label, masked = batch_of(states, table, torch.arange(len(states["prompt"])))
    with torch.no_grad():
        return float(((network(read) > 0) == label)[masked].float().mean())


def test_a_planted_rule_is_found_with_attention_and_not_without() -> None:
    states, table = planted()
    settings = FitSettings(epochs=12, batch_states=32, lr=3e-3, patience=12)
    reports: list[dict[str, Any]] = []
    network, facts = fit(TINY, states, table, settings, 0, reports.append)
    assert accuracy(network, states, table) > 0.98 and facts["eval_loss"] < 0.1
    assert facts["eval_loss"] == min(entry["eval_loss"] for entry in reports)
    control, worse = fit(replace(TINY, arch="mlp"), states, table, settings, 0, lambda entry: None)
    # All that it knows of the others is the share that is masked, and the last position knows itself.
    assert accuracy(control, states, table) < 0.8 and worse["eval_loss"] > 0.4


def test_it_stops_when_the_held_out_prompts_get_worse_and_keeps_the_best() -> None:
    states, table = planted(80)
    # Nothing to be learnt; by another seed than planted's, which would make what is masked the target.
    is_final = torch.rand(80, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    states["target"] = torch.where(is_final, states["top_ids"][..., 0], 25)
    reports: list[dict[str, Any]] = []
    settings = FitSettings(epochs=200, batch_states=8, lr=1e-2, patience=2, eval_fraction=0.3)
    network, facts = fit(TINY, states, table, settings, 0, reports.append)
    assert len(reports) == facts["epochs"] == facts["best_epoch"] + 2 < 200
    held_out = split_by_prompt(states["prompt"], 0.3)
    read, label, masked = batch_of(states, table, held_out.nonzero()[:, 0])
    with torch.no_grad():
        losses = torch.nn.functional.binary_cross_entropy_with_logits(network(read)[masked], label[masked].float())
    assert abs(float(losses) - facts["eval_loss"]) < 1e-5, "what is returned is what was best"


def test_prompts_are_held_out_whole_whatever_else_there_is() -> None:
    prompt = torch.randint(0, 300, (4000,), generator=torch.Generator().manual_seed(1))
    held_out = split_by_prompt(prompt, 0.2)
    assert 0.1 < float(held_out.float().mean()) < 0.3
    for number in prompt.unique().tolist():
        assert held_out[prompt == number].unique().numel() == 1
    assert torch.equal(split_by_prompt(prompt[:50], 0.2), held_out[:50])
    few = prompt.unique()[:3]
    assert int(split_by_prompt(few, 1e-6).sum()) == 1
    with pytest.raises(ValueError, match="collect more samples"):
        fit(TINY, planted(4)[0], planted(4)[1], FitSettings(), 0, lambda entry: None)


# The recipe.

FAST = ["--config", "learned-sampler", "--precision", "fp32", "--block_length", "8", "--pca_width", "4"]
FAST += ["--num_layers", "1", "--width", "16", "--ffn_width", "16", "--num_heads", "2", "--max_length", "600"]
FAST += ["--shard_samples", "3", "--epochs", "2", "--eval_fraction", "0.4", "--batch_states", "16"]


@pytest.fixture
def model_folder(chat_model: Any, processor: Any, tmp_path: Any) -> Any:
    chat_model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_from_a_file_to_a_sampler_that_load_finds(
    model_folder: Any,
    chats: Any,  # noqa: F811
    tmp_path: Any,
    capsys: Any,
) -> None:
    folder = model_folder
    out = tmp_path / "run"
    before = (folder / "model.safetensors").read_bytes()
    command = [*FAST, "--model", str(folder), "--data", str(chats), "--out", str(out)]
    assert train(command) == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(list((out / "trajectories").iterdir())) == 3, "8 rows by 3; a second epoch would say nothing new"
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in log] == [1, 2]
    model, processor = trimode_vlm.load(folder)
    content = json.loads((folder / "learned_sampler" / "sampler.json").read_text())
    assert content["network"]["block_length"] == 8 == model.learned_sampler.config.block_length
    assert content["trained"]["data"] == [str(chats)] and content["fit"]["train_states"] > 0
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": "Say 3"}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    out_of = model.generate(**inputs, mode="diffusion", commit_rule="learned", max_new_tokens=12, threshold=0.5)
    assert out_of.num_new_tokens[0]
    # The finished run again is no error; the control shares its trajectories and does not overwrite the sampler.
    assert train(command) == 0
    control = [*command[:-1], str(tmp_path / "mlp"), "--arch", "mlp", "--trajectories", str(out / "trajectories")]
    capsys.readouterr()
    assert train(control) == 1
    assert "learned_sampler is there already: move it away" in capsys.readouterr().err
    assert train([*control, "--install", "false"]) == 0
    assert not (tmp_path / "mlp" / "trajectories").exists()
    other = load_file(tmp_path / "mlp" / "learned_sampler" / "sampler.safetensors")
    assert "network.layers.0.up.weight" in other
    assert train([*command, "--states_per_block", "3"]) == 1
    assert "was made by other settings" in capsys.readouterr().err


def test_nanos_own_tasks_need_no_data(tmp_path: Any) -> None:
    options = ["--config", "learned-sampler-nano", "--out", str(tmp_path), "--samples", "6", "--shard_samples", "3"]
    assert train([*options, "--epochs", "1", "--eval_fraction", "0.5", "--tasks", "{text_spell: 1}"]) == 0
    model, _ = trimode_vlm.load("nano", sampler=tmp_path / "learned_sampler")
    assert model.learned_sampler.config.arch == "attention"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "{text_spell: 1}"], "give data (files, folders, hub ids) or tasks (nano's own): one of the two"),
        (["--arch", "rnn"], "arch must be one of attention, mlp, got 'rnn'"),
        (["--num_heads", "5"], "width 384 must be a multiple of num_heads 5"),
        (["--eval_fraction", "2"], "eval_fraction must be between 0 and 1"),
        (["--states_per_block", "0"], "states_per_block must be at least 1"),
        (["--block_length", "1"], "block_length must be at least 2"),
        (["--ffn", "1"], "the nearest known one is 'ffn_width'"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(options: Any, words: str, chats: Any, capsys: Any) -> None:  # noqa: F811
    assert train(["--config", "learned-sampler", "--data", str(chats), *options]) == 2
    assert words in capsys.readouterr().err
