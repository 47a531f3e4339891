"""The learned sampler at work: features, network, commit rule, folder. numpy, scripts and counts are the oracle."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MASK, PROMPT, answers, generate, prompts, speaker
from naive import count_forwards
from safetensors.torch import load_file, save_file
from torch import Tensor

import trimode_vlm
from trimode_vlm import cli
from trimode_vlm.checkpoints import convert
from trimode_vlm.eval import bench
from trimode_vlm.eval.bench_frontier import measure, sweep
from trimode_vlm.eval.sol import samplers
from trimode_vlm.eval.tasks import select
from trimode_vlm.learned_sampler import (
    PRESETS,
    SAMPLER_FOLDER,
    LearnedSampler,
    SamplerConfig,
    SamplerNetwork,
    features,
    fit_pca,
    look,
    project,
    read_sampler,
)

TINY = SamplerConfig(block_length=8, pca_width=5, num_layers=2, width=16, ffn_width=24, num_heads=2)


def tiny_sampler(model: Any, seed: int = 0, scale: float = 1.0, **changes: Any) -> LearnedSampler:
    """A random network whose verdicts differ from position to position."""
    torch.manual_seed(seed)
    network = SamplerNetwork(replace(TINY, **changes))
    torch.nn.init.normal_(network.head.weight, std=scale)
    return LearnedSampler(network, *fit_pca(model.encoder.embed_tokens.weight, TINY.pca_width))


# Features and network.


def test_features_are_those_of_a_naive_computation() -> None:
    rng = np.random.default_rng(0)
    B, T, V, width = 2, 5, 11, 3
    logits = rng.normal(size=(B, T, V)) * 3
    logits[..., 4] = -np.inf  # an id that no answer may hold
    table = rng.normal(size=(V, width)).astype(np.float32)
    masked, canvas = rng.random((B, T)) < 0.6, rng.integers(0, V, (B, T))
    expected = np.zeros((B, T, 3 * width + 6))
    for b in range(B):
        for t in range(T):
            p = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            order = sorted(range(V), key=lambda i, p=p: -p[i])[:3]
            scalars = [p[order[0]], p[order[0]] - p[order[1]], sum(p[i] for i in order)]
            scalars.append(-sum(x * math.log(x) for x in p if x > 0))
            vectors = [table[i] for i in order]
            if not masked[b, t]:
                vectors, scalars = [table[canvas[b, t]], np.zeros(width), np.zeros(width)], [1, 1, 1, 0]
            expected[b, t] = [*np.concatenate(vectors), *scalars, masked[b, t], masked[b].mean()]
    ids, scalars = look(torch.tensor(logits))
    got = features(torch.tensor(table), ids, scalars, torch.tensor(canvas), torch.tensor(masked))
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


def test_pca_is_that_of_numpys_svd() -> None:
    x = np.random.default_rng(1).normal(size=(40, 12)) @ np.diag(np.linspace(3, 0.2, 12)) + 5
    mean, components = fit_pca(torch.tensor(x), 4)
    np.testing.assert_allclose(mean.numpy(), x.mean(0), atol=1e-5)
    _, singular, vectors = np.linalg.svd(x - x.mean(0))
    scale = np.sqrt((singular[:4] ** 2 / 40).mean())
    for i in range(4):
        v = vectors[i] * np.sign(vectors[i][np.abs(vectors[i]).argmax()])
        np.testing.assert_allclose(components[i].numpy() * scale, v, atol=1e-4)
    table = project(torch.tensor(x), mean, components)
    assert abs(float(table.square().mean()) - 1) < 1e-4 and float(table.mean(0).abs().max()) < 1e-5
    with pytest.raises(ValueError, match=r"pca_width 13 is more than embeddings \[40, 12\] have components"):
        fit_pca(torch.tensor(x), 13)


def test_released_size_is_144_features_and_4_8_million_parameters() -> None:
    sizes = {}
    for name, config in PRESETS.items():
        for arch in ("attention", "mlp"):
            network = SamplerNetwork(replace(config, arch=arch))
            sizes[name, arch] = sum(p.numel() for p in network.parameters())
    assert PRESETS["released"].num_features == 144 and round(sizes["released", "attention"] / 1e6, 1) == 4.8
    for name in PRESETS:
        assert abs(sizes[name, "mlp"] / sizes[name, "attention"] - 1) < 0.01, "the control is of the same size"


@pytest.mark.parametrize("arch", ["attention", "mlp"])
def test_only_attention_sees_other_positions_and_both_ways(arch: str) -> None:
    torch.manual_seed(3)
    network = SamplerNetwork(replace(TINY, arch=arch)).eval()
    torch.nn.init.normal_(network.head.weight)
    x = torch.randn(1, 8, TINY.num_features)
    for place in (0, 4, 7):
        changed = x.clone()
        changed[0, place] += 1
        with torch.no_grad():
            moved = (network(x) - network(changed)).abs()[0] > 1e-6
        assert moved.tolist() == ([True] * 8 if arch == "attention" else [i == place for i in range(8)])
    with torch.no_grad():
        assert not torch.allclose(network(x), network(x.roll(1, 1)).roll(-1, 1), atol=1e-4), "it knows the position"
        network.position.zero_()
        assert torch.allclose(network(x), network(x.roll(1, 1)).roll(-1, 1), atol=1e-5)


def test_an_untrained_network_is_the_confidence_rule() -> None:
    model = make_tiny_model(vision=False)
    model.learned_sampler = LearnedSampler(SamplerNetwork(TINY), *fit_pca(model.encoder.embed_tokens.weight, 5))
    rows, options = prompts(4, seed=5), {"mode": "diffusion", "block_length": 8, "threshold": 0.1, "max_new_tokens": 20}
    learned, out = generate(model, rows, commit_rule="learned", **options)
    plain, expected = generate(model, rows, **options)
    assert learned == plain and out.nfe == expected.nfe
    assert out.nfe != generate(model, rows, **options | {"threshold": 0.9})[1].nfe


# The commit rule.


class Scripted:
    """A sampler that gives each position the probability of a script: {number of masks in the block: [k]}."""

    def __init__(self, script: dict[int, list[float]], block_length: int) -> None:
        self.script, self.config, self.calls = script, replace(TINY, block_length=block_length), 0
        self.mask_token_id = MASK

    def probabilities(self, model: Any, logits: Tensor, canvas: Tensor, masked: Tensor) -> Tensor:
        self.calls += 1
        assert ((canvas == self.mask_token_id) == masked).all() and logits.shape[:2] == canvas.shape
        return torch.tensor([self.script.get(n, [0.0] * canvas.shape[1]) for n in masked.sum(-1).tolist()])


def canvases(model: Any, **options: Any) -> list[list[int]]:
    events = model.stream(torch.tensor([PROMPT]), mode="diffusion", commit_rule="learned", **options)
    return [event.canvas for event in events if event.canvas is not None]


def test_it_commits_exactly_where_the_sampler_says_and_the_surest_always() -> None:
    text = [20, 21, 22, 23, 24, 25, END]
    model = speaker(text)
    # All equally sure: the leftmost mask is the model's surest. 0.6 itself is not above 0.6.
    model.learned_sampler = Scripted({6: [0.9, 0.1, 0.2, 0.61, 0.6, 0.2, 0.9], 3: [0.0] * 7}, 7)
    seen = canvases(model, threshold=0.6, block_length=7, max_new_tokens=7)
    kept = [[i for i, token in enumerate(canvas) if token != MASK] for canvas in seen]
    assert kept == [[0], [0, 1, 3, 6], [0, 1, 2, 3, 6], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6]]
    assert [token for token in seen[-1]] == text and model.learned_sampler.calls == 4


def test_everything_above_the_threshold_goes_at_once_and_without_one_a_token_per_step() -> None:
    text = [20, 21, 22, 23, 24, 25, 26, END]
    for threshold, steps in ((0.5, 1), (1.0, 7), (None, 7)):
        model = speaker(text)
        model.learned_sampler = Scripted({7: [0.0] + [1.0] * 7}, 8)
        sizes = count_forwards(model)
        options = {"commit_rule": "learned", "threshold": threshold, "block_length": 8, "max_new_tokens": 8}
        out = model.generate(torch.tensor([PROMPT]), mode="diffusion", **options)
        assert answers(out, len(PROMPT)) == [text]
        assert out.nfe == [len(sizes)] == [steps + 1], "the sampler runs no forward of the model"


def test_confidence_is_not_asked() -> None:
    """A model that is sure of nothing commits by the sampler, and one that is sure of all waits for it."""
    model = speaker([20, 21, 22, 23, END])
    model.learned_sampler = Scripted({}, 5)
    slow = len(canvases(model, threshold=0.5, block_length=5, max_new_tokens=5))
    model.learned_sampler = Scripted({4: [1.0] * 5}, 5)
    fast = len(canvases(model, threshold=0.5, block_length=5, max_new_tokens=5))
    assert (slow, fast) == (5, 2)


def test_a_row_in_a_batch_gives_what_it_gives_alone() -> None:
    model = make_tiny_model(vision=False)
    model.learned_sampler = tiny_sampler(model)
    rows = prompts(5, seed=2)
    options = {"mode": "diffusion", "threshold_from": "sampler", "threshold": 0.5, "max_new_tokens": 29}
    together, out = generate(model, rows, block_length=8, **options)
    for row, (prompt, answer) in enumerate(zip(rows, together, strict=True)):
        alone, single = generate(model, [prompt], block_length=8, **options)
        assert alone == [answer] and single.nfe == [out.nfe[row]]
    serial, slow = generate(model, rows, block_length=8, **options | {"threshold": None})
    fast, quick = generate(model, rows, block_length=8, **options | {"threshold": 1e-6})
    assert sum(quick.nfe) < sum(out.nfe) < sum(slow.nfe), "the threshold decides"
    assert generate(model, rows, block_length=8, mode="diffusion", threshold=None, max_new_tokens=29)[0] == serial
    assert all(MASK not in answer for answer in together)


def test_shorter_blocks_work_and_longer_ones_are_refused() -> None:
    model = make_tiny_model(vision=False)
    model.learned_sampler = tiny_sampler(model)
    for block_length in (1, 3, 8):
        (answer,), _ = generate(model, [PROMPT], mode="diffusion", commit_rule="learned", block_length=block_length)
        assert answer
    with pytest.raises(ValueError, match="trained on blocks of 8 tokens, got block_length 9: give at most that"):
        generate(model, [PROMPT], mode="diffusion", commit_rule="learned", block_length=9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True}, "judges likeliest tokens, not drawn ones: use do_sample=False"),
        ({"entropy_bound": 0.3}, "entropy_bound has no effect with commit_rule='learned'"),
        ({"threshold_from": "confidence"}, "threshold_from='confidence' and commit_rule='learned' ask for two rules"),
        ({"threshold_from": "samplr"}, "threshold_from must be one of confidence, sampler, got 'samplr'"),
        ({"mode": "ar"}, "mode 'ar' does not use 'commit_rule'"),
        ({"threshold": 0.0}, r"threshold must lie in \(0, 1\]"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], words: str) -> None:
    model = make_tiny_model(vision=False)
    model.learned_sampler = tiny_sampler(model)
    with pytest.raises(ValueError, match=words):
        generate(model, [PROMPT], **{"mode": "diffusion", "commit_rule": "learned", "block_length": 8, **options})


def test_without_a_sampler_the_rule_says_where_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"load\(..., sampler=FOLDER\), or train one"):
        generate(make_tiny_model(vision=False), [PROMPT], mode="diffusion", threshold_from="sampler")


def test_sol_shows_it_for_the_blocks_that_it_knows() -> None:
    assert not any("learned" in name for name in samplers(32, [0.9]))
    found = samplers(8, [0.9, 0.5], longest_learned=8)
    assert found["learned 0.5"] == {"mode": "diffusion", "commit_rule": "learned", "threshold": 0.5, "block_length": 8}
    assert list(samplers(16, [0.9], longest_learned=8)) == list(samplers(16, [0.9]))


# The folder.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_tiny_model()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("arch", ["attention", "mlp"])
def test_what_is_saved_is_what_is_read(folder: Path, tmp_path: Path, arch: str) -> None:
    model = make_tiny_model()
    sampler = tiny_sampler(model, arch=arch)
    sampler.save(tmp_path / "sampler", fit={"best_epoch": 3})
    assert json.loads((tmp_path / "sampler" / "sampler.json").read_text())["fit"] == {"best_epoch": 3}
    loaded, _ = trimode_vlm.load(folder, sampler=tmp_path / "sampler")
    assert loaded.learned_sampler.config == sampler.config
    ids, canvas = torch.randint(8, 60, (2, 8)), torch.full((2, 8), MASK)
    logits = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    masked = ids > 30
    canvas = torch.where(masked, canvas, ids)
    ours, theirs = (s.probabilities(model, logits, canvas, masked) for s in (sampler, loaded.learned_sampler))
    assert torch.equal(ours, theirs)


def test_it_lies_beside_the_weights_and_stays_out_of_them(folder: Path, tmp_path: Path) -> None:
    assert trimode_vlm.load(folder)[0].learned_sampler is None
    model, _ = trimode_vlm.load(folder)
    before = load_file(folder / "model.safetensors")
    sampler = tiny_sampler(model)
    sampler.save(folder / SAMPLER_FOLDER)
    model, _ = trimode_vlm.load(folder)
    assert model.learned_sampler is not None and trimode_vlm.load(folder, sampler=None)[0].learned_sampler is None
    generate(model, [PROMPT], mode="diffusion", commit_rule="learned", block_length=8)
    assert not any("sampler" in name or "network" in name for name in model.state_dict())
    model.save_pretrained(tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    converted, _ = trimode_vlm.load(convert(folder, tmp_path / "converted"))
    assert converted.learned_sampler.config == sampler.config, "convert brings it along"


def test_a_folder_that_does_not_fit_is_refused_with_what_does_not(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sampler.json, so this is not the folder of a learned sampler"):
        trimode_vlm.load(folder, sampler=tmp_path)
    model = make_tiny_model()
    path = tmp_path / "sampler"
    tiny_sampler(model).save(path)
    tensors = load_file(path / "sampler.safetensors")
    wrong = {**tensors, "pca.mean": torch.zeros(7)}
    wrong.pop("network.head.bias")
    save_file(wrong, path / "sampler.safetensors")
    with pytest.raises(ValueError, match="does not fit the model") as error:
        read_sampler(path, model)
    assert "pca.mean: (7,), expected (32,)" in str(error.value)
    assert "network.head.bias: None, expected (1,)" in str(error.value)
    (path / "sampler.safetensors").unlink()
    (path / "sampler.bin").touch()
    with pytest.raises(ValueError, match="pickled weights are never opened"):
        read_sampler(path, model)
    (path / "sampler.json").write_text(json.dumps({"network": {**asdict(TINY), "arch": "rnn"}}))
    with pytest.raises(ValueError, match="arch must be one of attention, mlp, got 'rnn'"):
        read_sampler(path, model)


def test_the_frontier_asks_each_sampler_at_its_own_points() -> None:
    model, processor = trimode_vlm.load("nano")
    model.learned_sampler = own = Scripted({n: [1.0] * 16 for n in range(16)}, 16)
    control = Scripted({}, 16)
    parser = cli.Parser()
    bench.add_arguments(parser)
    args = parser.parse(["frontier", *"--modes diffusion --block-lengths 16,32 --thresholds 0.5 --limit 1".split()])
    bench.check(args)
    points = [point for point in sweep(args, model, control) if point.commit_rule == "learned"]
    assert [point.name for point in points] == ["diffusion learned 16 at 0.5", "diffusion learned (control) 16 at 0.5"]
    own.mask_token_id = control.mask_token_id = model.config.mask_token_id
    fast, slow = measure({"": model}, processor, points, select(["text_spell"]), args, control)
    assert fast["nfe"] == 2 and slow["nfe"] == 16 and own.calls and control.calls
    assert model.learned_sampler is own
