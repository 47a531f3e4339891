"""Parts that train, LoRA by PEFT, gradient checkpointing, merging, and adapters that load again as they were saved."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from foreign_models import END, IMG, images, span, text_ids
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText, Mistral3ForConditionalGeneration

import trimode_vlm
from trimode_vlm import TriModeVLM, quantize
from trimode_vlm.checkpoints import convert
from trimode_vlm.config import TimmVisionConfig
from trimode_vlm.training.lora import LoraSettings, add_lora, lora_layers, merge, save_adapter
from trimode_vlm.training.parts import PARTS, describe, parameter_groups, part_of, plain_name, select_parts

IMAGE = 4


def inputs(grid=(2, 2), seed=0):
    """One row with an image of rows x columns merged cells, then text, under the ids of TINY_TEXT."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = grid
    text = torch.randint(8, 64, (1, 9), generator=generator)
    ids = torch.cat([torch.full((1, rows * columns), IMAGE), text], 1)
    return {"input_ids": ids, **images(grid, seed=seed)}


def loss_of(model, **given):
    given = given or inputs()
    return model(**given, labels=given["input_ids"]).loss


def train_a_little(model, steps=3, lr=0.05):
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return model.eval()


def names_that_train(model):
    return {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}


# Parts


@pytest.mark.parametrize("train", [("text",), ("vision",), ("projector",), ("text", "projector"), PARTS])
def test_exactly_the_chosen_parts_learn(train):
    model = make_tiny_model()
    select_parts(model, train)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_a_little(model, steps=1)
    changed = {part_of(name) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    unchanged = {part_of(name) for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert changed == set(train) and not unchanged & set(train)


def test_every_parameter_has_a_part_and_the_parts_are_those_of_the_released_names():
    parts = {name: part_of(name) for name, _ in make_tiny_model().named_parameters()}
    assert set(parts.values()) == set(PARTS)
    for name, part in parts.items():
        is_vision, is_projector = "vision_tower" in name, "multi_modal_projector" in name
        assert part == ("vision" if is_vision else "projector" if is_projector else "text"), name


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (("vision",), "this model has no vision (it is text only); its parts: text"),
        (("vision", "projector"), "no vision and no projector"),
        (("tower",), "unknown part 'tower'; known: text, vision, projector"),
        ((), "must name at least one of text, vision, projector"),
    ],
)
def test_a_part_that_is_not_there_is_an_error_that_names_it(train, message):
    with pytest.raises(ValueError) as error:
        select_parts(make_tiny_model(vision=False), train)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_groups_hold_every_trained_parameter_once_with_its_parts_rate_and_no_decay_on_vectors():
    model = make_tiny_model()
    select_parts(model)
    groups = parameter_groups(model, 1e-3, lr_vision=1e-5, lr_projector=1e-4, weight_decay=0.1)
    torch.optim.AdamW(groups)  # refuses a parameter that appears twice
    by_id = {id(p): group for group in groups for p in group["params"]}
    assert len(by_id) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        group = by_id[id(parameter)]
        assert group["lr"] == {"text": 1e-3, "vision": 1e-5, "projector": 1e-4}[part_of(name)], name
        assert group["weight_decay"] == (0.0 if parameter.ndim < 2 else 0.1), name
        assert ("norm" in name or "ln_pre" in name) == (group["weight_decay"] == 0.0), name


def test_groups_see_the_shape_that_zero_3_hides():
    model = make_tiny_model(vision=False)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    decays = {group["name"]: len(group["params"]) for group in parameter_groups(model, 1e-3)}
    assert decays == {"text": 2 + 2 * 7, "text-": 2 * 2 + 1}


def test_a_tied_head_is_counted_once():
    tied, untied = (make_tiny_model(vision=False, tie_word_embeddings=tie) for tie in (True, False))
    tied.tie_weights()
    assert tied.diffusion_head.weight is tied.encoder.embed_tokens.weight
    counts = [sum(p.numel() for group in parameter_groups(m, 1e-3) for p in group["params"]) for m in (tied, untied)]
    assert counts[1] - counts[0] == 64 * 32
    assert "3,968 train" not in describe(tied) and f"{counts[0]:,} train of {counts[0]:,}" in describe(tied)


def test_a_rate_for_a_part_that_does_not_train_is_refused():
    model = make_tiny_model()
    select_parts(model, ("text",))
    with pytest.raises(ValueError, match="lr_vision is set, but vision does not train here"):
        parameter_groups(model, 1e-3, lr_vision=1e-5)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter trains"):
        parameter_groups(model, 1e-3)


def test_a_frozen_batch_norm_keeps_its_statistics_and_a_trained_one_does_not():
    tower = TimmVisionConfig(architecture="test_efficientnet", patch_size=32, image_size=64)
    config = tiny_config()
    config.vision_config = tower
    model = TriModeVLM(config)
    pixels = torch.randn(2, 3, 64, 64)

    def moved():
        before = {k: v.clone() for k, v in model.state_dict().items() if "running_mean" in k}
        assert before
        model.train()
        model.encode_images(pixels)
        return any(not torch.equal(v, before[k]) for k, v in model.state_dict().items() if k in before)

    select_parts(model, ("text", "projector"))
    assert not moved()
    select_parts(model, PARTS)
    assert moved()


# LoRA


def test_lora_touches_the_text_model_only_though_the_tower_has_layers_of_the_same_name():
    model = make_tiny_model()
    assert any(n.startswith("encoder.vision_tower") and n.endswith("q_proj") for n, _ in model.named_modules())
    wrapped = add_lora(model, LoraSettings(rank=2))
    touched = {name.partition(".lora_")[0] for name in names_that_train(wrapped)}
    assert touched == {
        f"encoder.layers.{i}.{leaf}"
        for i in range(2)
        for leaf in [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    }
    assert (
        "by LoRA on 14 layers (encoder.layers.0.self_attn.q_proj, encoder.layers.0.self_attn.k_proj, ...)"
        in describe(wrapped)
    )
    assert "vision: frozen of" in describe(wrapped)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            dict(targets=("encoder.layers.*.self_attn.q_proj",)),
            [f"encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)],
        ),
        (dict(targets=("encoder.layers.1.mlp.up_proj",)), ["encoder.layers.1.mlp.up_proj"]),
        (dict(targets=("q_proj",)), [f"encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)]),
        (dict(targets=("diffusion_head",)), ["diffusion_head"]),
        (
            dict(targets=("q_proj",), parts=("text", "vision")),
            [f"encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)]
            + [f"encoder.vision_tower.transformer.layers.{i}.attention.q_proj" for i in (0, 1)],
        ),
        (dict(targets=("linear_2",), parts=("projector",)), ["encoder.multi_modal_projector.linear_2"]),
    ],
)
def test_targets_are_what_was_asked_for_and_peft_wraps_just_those(settings, expected):
    model = make_tiny_model()
    assert sorted(lora_layers(model, LoraSettings(**settings))) == sorted(expected)
    wrapped = add_lora(model, LoraSettings(rank=2, **settings))
    assert {name.partition(".lora_")[0] for name in names_that_train(wrapped)} == set(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(targets=("query",)), "'query' matches no linear layer of text; near: "),
        (dict(targets=("encoder.layers.*.self_attn.qproj",)), "near: encoder.layers."),
        (dict(targets=("layers.0.self_attn.q_proj",)), "matches no linear layer"),
        (dict(targets=("linear_1",)), "'linear_1' is found in projector only (encoder.multi_modal_projector.linear_1)"),
        (dict(targets=("q_proj", "encoder.vision_tower.*.layers.*.attention.k_proj")), "is found in vision only"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(settings, message):
    with pytest.raises(ValueError) as error:
        add_lora(make_tiny_model(), LoraSettings(**settings))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_lora_cannot_do_is_refused_in_one_line():
    with pytest.raises(ValueError, match="lora.parts: this model has no vision"):
        add_lora(make_tiny_model(vision=False), LoraSettings(parts=("vision",)))
    with pytest.raises(ValueError, match="text cannot train whole beside LoRA"):
        add_lora(make_tiny_model(), LoraSettings(), train=("text",))
    with pytest.raises(ValueError, match="tied to the embedding"):
        add_lora(make_tiny_model(tie_word_embeddings=True), LoraSettings(targets=("diffusion_head",)))
    for wrong in (dict(rank=0), dict(alpha=0.0), dict(dropout=1.0), dict(targets=()), dict(parts=("head",)),
                  dict(quantize="8bit")):  # fmt: skip
        with pytest.raises(ValueError):
            LoraSettings(**wrong)


def test_lora_starts_at_the_base_and_the_base_stays_frozen():
    model = make_tiny_model()
    with torch.no_grad():
        expected = model(**inputs()).logits
    before = {name: p.clone() for name, p in model.state_dict().items()}
    wrapped = add_lora(model, LoraSettings(rank=2))
    with torch.no_grad():
        assert torch.equal(wrapped.eval()(**inputs()).logits, expected)
    train_a_little(wrapped)
    with torch.no_grad():
        assert not torch.allclose(wrapped(**inputs()).logits, expected, atol=1e-3)
    after = {plain_name(name): p for name, p in wrapped.state_dict().items() if ".lora_" not in name}
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


# Merging and loading


@pytest.mark.parametrize("train", [(), ("projector",), ("projector", "vision")])
def test_merged_logits_are_the_adapters_and_names_the_released_ones(train):
    model = make_tiny_model()
    names = set(model.state_dict())
    wrapped = train_a_little(add_lora(model, LoraSettings(rank=3, alpha=7), train))
    with torch.no_grad():
        expected = wrapped(**inputs()).logits
        merged = merge(wrapped)
        assert set(merged.state_dict()) == names and isinstance(merged, TriModeVLM)
        torch.testing.assert_close(merged(**inputs()).logits, expected, atol=1e-5, rtol=1e-5)
    assert merge(merged) is merged


@pytest.mark.parametrize("mode", ["ar", "diffusion", "linear_spec"])
def test_an_unmerged_adapter_decodes_as_the_merged_model(mode):
    """Decoding runs on bare weights where it may; with LoRA on the layers it must not."""
    model = make_tiny_model()
    given = {**inputs(), "mode": mode, "max_new_tokens": 12}
    plain = model.generate(**given).sequences
    wrapped = train_a_little(add_lora(model, LoraSettings(rank=3)))
    adapted = wrapped.generate(**given).sequences
    assert adapted.tolist() == merge(wrapped).generate(**given).sequences.tolist() != plain.tolist()


@pytest.fixture
def trained(tmp_path):
    """A tiny model on disk and an adapter, trained on it with the whole projector: (base, adapter folder, logits)."""
    make_tiny_model().save_pretrained(tmp_path / "base")
    model, _ = trimode_vlm.load(tmp_path / "base")
    wrapped = train_a_little(add_lora(model, LoraSettings(rank=3, dropout=0.1), train=("projector",)))
    save_adapter(wrapped, tmp_path / "adapter", tmp_path / "base")
    with torch.no_grad():
        return tmp_path / "base", tmp_path / "adapter", wrapped(**inputs()).logits


def logits_of(model):
    with torch.no_grad():
        return model.eval()(**inputs()).logits


def test_an_adapter_folder_loads_by_peft_by_us_and_after_convert(trained, tmp_path, capsys):
    base, adapter, expected = trained
    plain = logits_of(trimode_vlm.load(base)[0])
    assert not torch.allclose(plain, expected, atol=1e-3)
    for reader in (TriModeVLM, AutoModelForImageTextToText):
        wrapped = PeftModel.from_pretrained(reader.from_pretrained(base), adapter)
        assert torch.equal(logits_of(wrapped), expected)
    loaded, _ = trimode_vlm.load(adapter)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name in loaded.state_dict())

    from trimode_vlm.cli import main

    assert main(["convert", str(adapter), str(tmp_path / "merged")]) == 0
    assert torch.equal(logits_of(TriModeVLM.from_pretrained(tmp_path / "merged")), logits_of(loaded))


def test_our_merge_is_pefts_bit_for_bit(trained):
    base, adapter, _ = trained
    merged = PeftModel.from_pretrained(trimode_vlm.load(base)[0], adapter).merge_and_unload().state_dict()
    ours = trimode_vlm.load(adapter)[0].state_dict()
    assert merged.keys() == ours.keys()
    for name in merged:
        torch.testing.assert_close(ours[name], merged[name], atol=1e-6, rtol=0)
        if "self_attn" not in name and "mlp" not in name:
            assert torch.equal(ours[name], merged[name]), name


def test_loading_never_initialises_a_weight_again(trained, monkeypatch):
    """Neither base, factors nor whole modules: where every initialiser writes a seven, no seven is left."""
    base, adapter, _ = trained
    stored = load_file(base / "model.safetensors")
    saved_adapter = load_file(adapter / "adapter_model.safetensors")

    for name in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "xavier_uniform_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor.data.fill_(7.0))
    for model in (TriModeVLM.from_pretrained(base), trimode_vlm.load(base)[0]):
        assert all(torch.equal(p, stored[name]) for name, p in model.state_dict().items())
        wrapped = PeftModel.from_pretrained(model, adapter)
        live = wrapped.state_dict()
        for name, p in live.items():
            plain = plain_name(name).replace(".default", "")
            if ".lora_" in name or ".modules_to_save." in name:
                assert torch.equal(p, saved_adapter[f"base_model.model.{plain}"]), name
            else:
                assert torch.equal(p, stored[plain]), name
    merged = trimode_vlm.load(adapter)[0].state_dict()
    for name, p in merged.items():
        if f"base_model.model.{name}" in saved_adapter:
            assert torch.equal(p, saved_adapter[f"base_model.model.{name}"])
        elif "self_attn" not in name and "mlp" not in name:
            assert torch.equal(p, stored[name])


def test_an_adapter_of_an_adapter_loads(trained, tmp_path):
    _, adapter, _ = trained
    model, _ = trimode_vlm.load(adapter)
    wrapped = train_a_little(add_lora(model, LoraSettings(rank=2)))
    gathered = dict(wrapped.state_dict())  # as ZeRO-3 hands it over
    save_adapter(wrapped, tmp_path / "second", adapter, gathered)
    assert not (tmp_path / "second" / "README.md").exists()
    loaded, _ = trimode_vlm.load(tmp_path / "second")
    torch.testing.assert_close(logits_of(loaded), logits_of(wrapped), atol=1e-4, rtol=1e-4)


def test_a_ministral_fine_tuned_by_lora_is_the_same_model_through_transformers(mistral3_folder, tmp_path):
    model, _ = trimode_vlm.load(mistral3_folder)
    ids = torch.cat([torch.tensor([span(2, 3)]), text_ids(1, 12)], 1)
    given = {"input_ids": ids, **images((2, 3))}
    wrapped = add_lora(model, LoraSettings(rank=4), train=("projector",))
    optimizer = torch.optim.AdamW(parameter_groups(wrapped, 0.02, lr_projector=0.01))
    wrapped.train()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, **given).backward()
        optimizer.step()
    save_adapter(wrapped, tmp_path / "adapter", mistral3_folder)
    with torch.no_grad():
        expected = wrapped.eval()(**given).logits
        before = trimode_vlm.load(mistral3_folder)[0](**given).logits
        assert not torch.allclose(before, expected, atol=1e-2)
        loaded, _ = trimode_vlm.load(tmp_path / "adapter")
        torch.testing.assert_close(loaded(**given).logits, expected, atol=1e-4, rtol=1e-4)
        convert(tmp_path / "adapter", tmp_path / "hf", "ministral3")
        theirs = Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
        torch.testing.assert_close(theirs(**given).logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merge(wrapped)(**given).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_lora_that_was_trained_on_transformers_own_class_loads(mistral3_folder, tmp_path):
    theirs = Mistral3ForConditionalGeneration.from_pretrained(mistral3_folder)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=r".*language_model.*\.(q_proj|down_proj)", use_rslora=True)
    wrapped = get_peft_model(theirs, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    given = {"input_ids": torch.cat([torch.tensor([span(2, 2)]), text_ids(1, 6)], 1), **images((2, 2))}
    assert IMG in given["input_ids"] and END in given["input_ids"]
    with torch.no_grad():
        expected = wrapped.eval()(**given).logits
        torch.testing.assert_close(
            trimode_vlm.load(tmp_path / "adapter")[0](**given).logits, expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: edit(a, base_model_name_or_path="/nowhere/at/all"), "the base model cannot be found"),
        (lambda a: edit(a, base_model_name_or_path=None), "base_model_name_or_path is missing"),
        (lambda a: edit(a, base_model_name_or_path="."), "is this folder itself"),
        (lambda a: edit(a, use_dora=True), "only plain LoRA can be merged here, this adapter has use_dora"),
        (lambda a: edit(a, peft_type="IA3"), "peft_type 'IA3'"),
        (lambda a: edit(a, r=5), "do not fit a weight of"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda a: rename_factor(a, "layers.0.", "layers.9."), "encoder.layers.9.self_attn.q_proj.*no such"),
        (lambda a: rename_factor(a, "lora_A.weight", "lora_A.bias"), "expected lora_A.weight and lora_B.weight"),
        (lambda a: edit(a, modules_to_save=None), "no module of modules_to_save"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(trained, change, message):
    _, adapter, _ = trained
    change(adapter)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        trimode_vlm.load(adapter)


def edit(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_factor(adapter, old, new):
    path = adapter / "adapter_model.safetensors"
    save_file({k.replace(old, new): v for k, v in load_file(path).items()}, path)


def test_an_adapter_finds_its_base_by_a_relative_path_and_brings_its_own_tokenizer(trained, tmp_path, processor):
    base, adapter, expected = trained
    shutil.move(base, adapter.parent / "moved")
    edit(adapter, base_model_name_or_path="../moved")
    model, none = trimode_vlm.load(adapter)
    torch.testing.assert_close(logits_of(model), expected, atol=1e-5, rtol=1e-5)
    assert none is None
    processor.save_pretrained(adapter.parent / "moved")
    assert trimode_vlm.load(adapter)[1] is not None
    processor.save_pretrained(adapter)
    (adapter.parent / "moved" / "tokenizer.json").unlink()
    assert trimode_vlm.load(adapter)[1] is not None


def test_an_adapter_of_nano_is_float32_as_nano_is(tmp_path):
    model, _ = trimode_vlm.load("nano")
    save_adapter(add_lora(model, LoraSettings(rank=1, targets=("q_proj",))), tmp_path, "nano")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "nano"
    loaded, processor = trimode_vlm.load(tmp_path)
    assert loaded.dtype == torch.float32 and processor is not None
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), trimode_vlm.load("nano")[0].parameters(), strict=True)
    )


# Gradient checkpointing


@pytest.mark.parametrize("train", ["whole", "lora", "lora and projector", "frozen embedding", "vision by lora"])
def test_gradient_checkpointing_changes_no_gradient(train):
    def gradients(checkpointing):
        model = make_tiny_model()
        if checkpointing == "before":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if train == "lora":
            torch.manual_seed(0)
            model = add_lora(model, LoraSettings(rank=2))
        elif train == "lora and projector":
            torch.manual_seed(0)
            model = add_lora(model, LoraSettings(rank=2), ("projector",))
        elif train == "vision by lora":
            torch.manual_seed(0)
            model = add_lora(model, LoraSettings(rank=2, parts=("vision",), targets=("q_proj", "down_proj")))
        elif train == "frozen embedding":
            model.encoder.embed_tokens.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.1)
        if checkpointing == "after":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        calls = []
        for module in model.modules():
            if type(module).__name__ in ("DecoderLayer", "VisionLayer"):
                module.register_forward_pre_hook(lambda *_: calls.append(1))
        loss_of(model).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, len(calls)

    plain, forwards = gradients(None)
    assert forwards == 4 and all(gradient is not None for gradient in plain.values())
    for when in ("before", "after"):
        found, again = gradients(when)
        assert found.keys() == plain.keys()
        # Frozen towers below nothing that trains are not run again; whatever is on the way of a gradient is.
        assert again == (8 if "vision" in train or train in ("whole", "frozen embedding") else 6), again
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("architecture", "patch"), [("test_vit", 16), ("test_efficientnet", 32)])
def test_gradient_checkpointing_reaches_a_timm_tower(architecture, patch):
    def gradients(checkpointing):
        torch.manual_seed(0)
        config = tiny_config()
        config.vision_config = TimmVisionConfig(architecture=architecture, patch_size=patch, image_size=64)
        model = TriModeVLM(config)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls = []
        for module in model.encoder.vision_tower.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_pre_hook(lambda *_: calls.append(1))
        model.train()
        generator = torch.Generator().manual_seed(0)
        features = model.encode_images(torch.randn(1, 3, 64, 64, generator=generator))
        sum((feature**2).sum() for feature in features).backward()
        return [p.grad for p in model.encoder.vision_tower.parameters()], len(calls)

    (plain, once), (found, again) = gradients(False), gradients(True)
    assert again > 1.5 * once
    for expected, gradient in zip(plain, found, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


# 4-bit weights


def test_4bit_without_bitsandbytes_or_cuda_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = "4-bit weights need the bitsandbytes package and a CUDA device, not found here: leave quantize out"
    lora = LoraSettings(quantize="4bit")
    for ask in (lambda: add_lora(make_tiny_model(), lora), lambda: trimode_vlm.load("nano", quantize="4bit")):
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == expected
    with pytest.raises(ValueError, match="quantize must be 'int8', 'int4', '4bit' or left out, got '8bit'"):
        trimode_vlm.load("nano", quantize="8bit")


def test_a_4bit_base_is_not_merged_into():
    wrapped = add_lora(make_tiny_model(), LoraSettings(rank=2))
    wrapped.get_base_model().is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="trimode-vlm convert ADAPTER OUT"):
        merge(wrapped)


def test_4bit_text_layers_learn_by_lora():
    pytest.importorskip("bitsandbytes")
    model = make_tiny_model(hidden_size=64, intermediate_size=128, head_dim=16)
    expected = logits_of(model)
    quantize.replace_linears(model)
    model.to("cpu" if not torch.cuda.is_available() else "cuda")
    kinds = {type(m).__name__ for m in model.encoder.layers.modules()} - {"ModuleList"}
    assert "Linear4bit" in kinds and "Linear" not in kinds
    assert type(model.diffusion_head) is nn.Linear and part_of("diffusion_head") == "text"
    wrapped = add_lora(model, LoraSettings(rank=4))
    loss = loss_of(wrapped)
    loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.requires_grad)
    error = (logits_of(wrapped) - expected).norm() / expected.norm()
    assert 0 < error < 0.5
    assert wrapped.generate(**inputs(), max_new_tokens=4).sequences.shape[1] > inputs()["input_ids"].shape[1]
