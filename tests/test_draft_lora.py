"""The draft adapter's training: its loss and its slots against slow versions, and the recipe from a file to `load`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import EXAMPLES
from peft import PeftModel
from safetensors.torch import load_file
from test_finetune import write_rows
from test_trainer import log_of
from torch import Tensor
from training_cases import EOS, MASK, MIXED, noise_settings, sample, tiny_model

import trimode_vlm
from trimode_vlm import patterns
from trimode_vlm.cache import KVCache
from trimode_vlm.training import saves
from trimode_vlm.training.cli import train
from trimode_vlm.training.collate import Batch, micro_batches
from trimode_vlm.training.draft_loss import draw_drafts, lk_hybrid, positions_that_count, slots_of
from trimode_vlm.training.draft_model import DraftModel
from trimode_vlm.training.draft_trainer import draws

CPU = torch.device("cpu")
LAYOUT = {
    "end_token_id": EOS, "response_padding": "block", "full_block_fraction": 1.0, "clean_first_fraction": 1.0,
    "block_offset": "random",
}  # fmt: skip


# The loss.


def naive_lk(z_d: list[float], z_t: list[float], top: int, lam_of: Any) -> float:
    """One position of facts.md 3, in words: union of the top sets, temperature 3, renormalised."""
    best = [set(sorted(range(len(z)), key=lambda i: -z[i])[:top]) for z in (z_d, z_t)]
    union = sorted(best[0] | best[1])
    e_d, e_t = ([math.exp(z[i] / 3) for i in union] for z in (z_d, z_t))
    q, p = [x / sum(e_d) for x in e_d], [x / sum(e_t) for x in e_t]
    acceptance = sum(map(min, p, q))
    lam = lam_of(acceptance)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return lam * kl + (1 - lam) * 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))


def test_lk_hybrid_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, verifier = (4 * torch.randn(12, 40, generator=generator) for _ in range(2))
    verifier[3] = draft[3]
    expected = [
        naive_lk(d, t, 5, lambda a: math.exp(-0.5 * a)) for d, t in zip(draft.tolist(), verifier.tolist(), strict=True)
    ]
    got = lk_hybrid(draft, verifier, top=5)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert abs(float(got[3])) < 1e-6
    # A vocabulary smaller than the top set, with an id that no answer may hold.
    draft[:, 0] = verifier[:, 0] = -1e9
    assert lk_hybrid(draft, verifier).isfinite().all()


def test_no_gradient_goes_through_lam() -> None:
    draft = torch.tensor([[2.0, -1.0, 0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    verifier = torch.tensor([[-1.0, 1.5, 0.3, 0.2]], dtype=torch.float64)
    lk_hybrid(draft, verifier).sum().backward()
    p, q = (verifier / 3).softmax(-1)[0], (draft.detach() / 3).softmax(-1)[0]
    lam = math.exp(-0.5 * float(torch.minimum(p, q).sum()))
    assert draft.grad is not None
    for i in range(4):
        values = []
        for h in (1e-4, -1e-4):
            moved = draft.detach().clone()
            moved[0, i] += h
            values.append(naive_lk(moved[0].tolist(), verifier[0].tolist(), 4, lambda a: lam))
        assert abs((values[0] - values[1]) / 2e-4 - float(draft.grad[0, i])) < 1e-5


def test_drafts_follow_the_softmax_or_the_argmax() -> None:
    logits = torch.tensor([0.5, 1.5, -1e9, 0.0])
    num = 20_000
    uniform = torch.rand(num, generator=torch.Generator().manual_seed(3))
    drawn = draw_drafts(logits.expand(num, -1), uniform, torch.zeros(num, dtype=torch.bool))
    expected = logits.softmax(-1) * num
    counts = torch.bincount(drawn, minlength=4).float()
    assert counts[2] == 0
    chi2 = float(((counts - expected)[[0, 1, 3]].square() / expected[[0, 1, 3]]).sum())
    assert chi2 < 9.21, "p > 0.01 with 2 degrees of freedom"
    assert (draw_drafts(logits.expand(num, -1), uniform, torch.ones(num, dtype=torch.bool)) == 1).all()


def test_what_counts_is_the_accepted_drafts_and_the_first_mismatch() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 6, (200,), generator=generator).tolist()
    slot = torch.tensor([number for number, n in enumerate(lengths) for _ in range(n)])
    draft, target = (torch.randint(0, 3, slot.shape, generator=generator) for _ in range(2))
    target = torch.where(torch.rand(slot.shape, generator=generator) < 0.6, draft, target)
    seed_is_end = torch.rand(200, generator=generator) < 0.2
    accepted, active = positions_that_count(draft, target, slot, draft == 0, seed_is_end)
    place = 0
    for number, n in enumerate(lengths):
        going = not bool(seed_is_end[number])
        for i in range(place, place + n):
            assert bool(active[i]) == going and bool(accepted[i]) == (going and draft[i] == target[i])
            going = going and bool(draft[i] == target[i]) and draft[i] != 0
        place += n


# Slots in one forward.


def batches(samples: Any = MIXED, size: int | None = None, **changes: Any) -> list[Batch]:
    return micro_batches(samples, noise_settings(**LAYOUT, **changes), micro_batch_samples=size)


def drafting(seed: int = 0, size: float = 0.3) -> DraftModel:
    """A model with a LoRA that has learnt something."""
    model = DraftModel(tiny_model(seed).eval(), rank=3, alpha=6.0, chunk_tokens=7).eval()
    torch.manual_seed(seed)
    for layer in model.lora:
        torch.nn.init.normal_(layer.lora_B, std=size)
    return model


def naive_terms(model: DraftModel, s: Any, batch: Batch, uniform: Tensor, is_greedy: Tensor) -> list[float]:
    """Slot by slot over a cache, as linear_spec decodes: prefix by the bare weights, draft, verify, score."""
    base, adapter = model.model, model.as_adapter()
    clean = base.embed(torch.tensor([s.input_ids]), batch.pixel_values, batch.image_sizes)
    sums = [0.0] * 4
    for number in batch.block_id[0].unique().tolist():
        if number < 0:
            continue
        members = (batch.block_id[0] == number).nonzero()[:, 0]
        first, k = int(batch.block_start[0, members[0]]), len(members)
        assert batch.input_ids[0, members].tolist() == [s.input_ids[first]] + [MASK] * (k - 1)
        cache = KVCache(base.config, 1, 100, torch.float32)

        def run(x: Tensor, kind: Any, deltas: Any = None, cache: KVCache = cache) -> Tensor:
            n, T = cache.lengths[0], x.shape[1]
            hidden = base.hidden(x, torch.arange(n, n + T)[None], kind(1, T, CPU, n), cache, None, deltas)
            logits = base.diffusion_head(hidden)[0]
            logits[:, base.config.banned_ids([EOS])] = -1e9
            return logits

        run(clean[:, :first], patterns.causal)
        cache.truncate(first)
        z_d = run(base.encoder.embed_tokens(batch.input_ids[:, members]), patterns.block, adapter.deltas(base))[1:]
        greedy = bool(is_greedy[0, members[0]])
        ids = z_d.argmax(-1) if greedy else draw_drafts(z_d, uniform[0, members[1:]], torch.zeros(k - 1).bool())
        z_t = run(base.encoder.embed_tokens(torch.cat([batch.input_ids[0, members[:1]], ids])[None]), patterns.causal)
        going = s.input_ids[first] != EOS
        for i in range(k - 1):
            if not going:
                break
            target = int(z_t[i].argmax())
            sums[0] += float(lk_hybrid(z_d[i : i + 1], z_t[i : i + 1]))
            sums[1] += float(-z_d[i].log_softmax(-1)[target])
            sums[2] += ids[i] == target
            sums[3] += 1
            going = bool(ids[i] == target) and target != EOS
    return [float(x) for x in sums]


@pytest.mark.parametrize("number", range(len(MIXED)))
@pytest.mark.parametrize("greedy", [True, False])
def test_one_forward_equals_decoding_slot_by_slot(number: int, greedy: bool) -> None:
    """Images, several turns, and slots over the end of an answer among them."""
    model = drafting()
    for epoch in range(3):
        s = replace(MIXED[number], epoch=epoch)
        (batch,) = batches([s])
        uniform, is_greedy = draws(batch, 0, 5)
        is_greedy = is_greedy if not greedy else torch.ones_like(is_greedy)
        with torch.no_grad():
            expected = naive_terms(model, s, batch, uniform, is_greedy)
            got = model(batch, uniform, is_greedy)
        assert got[2:].tolist() == expected[2:]
        torch.testing.assert_close(got[:2], torch.tensor(expected[:2]), atol=1e-3, rtol=1e-4)


def test_a_batch_and_packed_rows_give_the_sums_of_the_samples() -> None:
    model = drafting()
    sums = []
    for size, packing in ((1, None), (4, None), (4, 200)):
        noise = noise_settings(**LAYOUT)
        cut = micro_batches(MIXED, noise, micro_batch_samples=size, packing_length=packing)
        sums.append(torch.stack([model(batch, *draws(batch, 3, 9)).detach() for batch in cut]).sum(0))
    torch.testing.assert_close(sums[1], sums[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(sums[2], sums[0], atol=1e-3, rtol=1e-4)


def test_a_tenth_of_the_slots_is_greedy_by_sample_alone() -> None:
    many = [sample(n, ((3, 400),)) for n in range(12)]
    shares = []
    for batch in batches(many, size=1):
        seeds = slots_of(batch.target, batch.is_noisy).seed
        shares.append(draws(batch, 0, 2)[1].flatten()[seeds].float())
    assert 0.07 < float(torch.cat(shares).mean()) < 0.13
    (first,), (both,) = batches(many[1:2]), batches(many[:2])
    alone, together = draws(first, 0, 2), draws(both, 0, 2)
    mine = (both.sequence == both.sequence[-1 if both.sample_ids[-1] == 1 else 0].max()) & both.is_noisy
    assert torch.equal(together[0][mine], alone[0][first.is_noisy])
    assert not torch.equal(draws(first, 0, 3)[0], alone[0]), "another step draws anew"


def test_only_the_lora_has_gradients_and_learns() -> None:
    model = drafting(size=0.0)
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    optimizer = torch.optim.Adam(model.lora.parameters(), lr=1e-2)
    (batch,) = batches()
    losses = []
    for _ in range(30):
        terms = model.train()(batch, *draws(batch, 0, 0))
        losses.append(float((terms[0] + terms[1]).detach() / terms[3]))
        optimizer.zero_grad()
        ((terms[0] + terms[1]) / terms[3]).backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.model.named_parameters())


def test_a_batch_without_targets_gives_zeros_that_depend_on_the_lora() -> None:
    from trimode_vlm.training.collate import dummy_batch

    model, batch = drafting(), dummy_batch()
    terms = model(batch, *draws(batch, 0, 0))
    assert terms.tolist() == [0.0] * 4
    terms[:2].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.lora.parameters())


# The recipe.

FAST = ["--lr", "1e-2", "--batch_samples", "4", "--log_every", "1", "--block_length", "8", "--max_length", "600"]
FAST += ["--lora.rank", "4", "--lora.alpha", "16", "--config", "draft-lora"]


@pytest.fixture
def folder(chat_model: Any, processor: Any, tmp_path: Any) -> Any:
    chat_model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Texts and pictures."""
    image = str(EXAMPLES / "receipt-1.png")
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}, yes."}]}
        for n in range(6)
    ]
    question = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    rows += [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "A receipt."}]}] * 2
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", rows)


def test_from_a_file_to_an_adapter_that_load_and_peft_read(folder: Any, chats: Any, tmp_path: Any, capsys: Any) -> None:
    out = tmp_path / "run"
    before = load_file(folder / "model.safetensors")
    command = [*FAST, "--model", str(folder), "--data", str(chats), "--out", str(out), "--steps", "25"]
    assert train(command) == 0
    log = [entry for entry in log_of(out) if "lk_loss" in entry]
    first, last = (sum(e["lk_loss"] + e["ce_loss"] for e in part) for part in (log[:5], log[-5:]))
    assert last < first and all(entry["accepted_length"] >= 1 for entry in log)
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    files = {path.name for path in (out / "linear_spec_lora").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    released = "base_model.model.encoder.layers.1.self_attn.o_proj.lora_B.weight"
    assert load_file(folder / "linear_spec_lora" / "adapter_model.safetensors")[released].dtype == torch.float32

    model, _ = trimode_vlm.load(folder, adapter="auto")
    peft = PeftModel.from_pretrained(trimode_vlm.load(folder)[0], folder / "linear_spec_lora").eval()
    ids = torch.randint(20, 60, (1, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(input_ids=ids, adapter=model.draft_adapter.deltas(model)).logits
        torch.testing.assert_close(ours, peft(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(ours, model(input_ids=ids).logits, atol=1e-3)
    # The finished run again is no error; another run does not overwrite what is there.
    assert train(command) == 0
    capsys.readouterr()
    assert train([*command[:-3], str(tmp_path / "other"), "--steps", "1"]) == 1
    assert (
        "linear_spec_lora is there already: move it away, or leave it with --install false" in capsys.readouterr().err
    )


def test_it_resumes_bitwise_from_checkpoints_that_hold_the_lora_alone(folder: Any, chats: Any, tmp_path: Any) -> None:
    options = [*FAST, "--model", str(folder), "--data", str(chats), "--install", "false", "--save_every", "3"]
    for name in "ab":
        assert train([*options, "--out", str(tmp_path / name), "--steps", "6"]) == 0
    last = saves.newest_checkpoint(tmp_path / "b")
    assert last is not None and not (last / "model.safetensors").exists()
    (last / saves.MANIFEST).write_text("{")
    with pytest.warns(UserWarning, match="torn"):
        assert train([*options, "--out", str(tmp_path / "b"), "--steps", "6"]) == 0
    first, second = (load_file(tmp_path / name / "linear_spec_lora" / "adapter_model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(second[name].any() for name in second if "lora_B" in name)
    assert not (folder / "linear_spec_lora").exists()


def test_evaluation_tells_how_much_is_accepted_and_the_best_is_exported(folder: Any, chats: Any, tmp_path: Any) -> None:
    out = tmp_path / "run"
    options = ["--model", str(folder), "--data", str(chats), "--out", str(out), "--eval_fraction", "0.25"]
    options += ["--eval_every", "2", "--save_every", "2", "--export", "best", "--epochs", "3", "--install", "false"]
    assert train([*FAST, *options]) == 0
    evaluated = [entry for entry in log_of(out) if "eval_loss" in entry]
    assert len(evaluated) >= 2
    for entry in evaluated:
        assert entry["eval_loss"] == entry["eval_rejected_share"] and entry["eval_accepted_length"] >= 1
    best = json.loads((saves.newest_checkpoint(out) / "trainer_state.json").read_text())["best_model_checkpoint"]
    chosen, exported = (load_file(f / "adapter_model.safetensors") for f in (out / best, out / "linear_spec_lora"))
    assert all(torch.equal(chosen[name], exported[name]) for name in chosen)


def test_nanos_own_tasks_need_no_data(tmp_path: Any) -> None:
    options = ["--config", "draft-lora-nano", "--out", str(tmp_path), "--steps", "1", "--batch_samples", "1"]
    assert train([*options, "--tasks", "{text_spell: 1}"]) == 0
    assert (tmp_path / "linear_spec_lora" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora.targets", "q_proj"], "lora.targets must be [o_proj] in recipe draft_lora"),
        (["--lora.dropout", "0.1"], "lora.dropout and lora.quantize are not for recipe draft_lora"),
        (["--full_block_fraction", "0.5"], "full_block_fraction is 1.0 in recipe draft_lora, got 0.5"),
        (["--block_length", "1"], "block_length must be one number of at least 2 here, got 1"),
        (["--deepspeed", "zero2"], "run it under torchrun"),
        (["--tasks", "{text_spell: 1}"], "tasks are nano's own, in place of data: give one of the two"),
        (["--lora.rank", "0"], "lora.rank must be at least 1, got 0"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(options: list[str], words: str, chats: Any, capsys: Any) -> None:
    assert train(["--config", "draft-lora", "--data", str(chats), *options]) == 2
    assert words in capsys.readouterr().err
