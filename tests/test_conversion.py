"""FP8 sources, saving, Auto classes, conversion there and back, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import (
    TEXT,
    YARN,
    assert_bitwise,
    edit_json,
    edit_weights,
    mistral3,
    randomise,
    saved,
    tensors,
    text_ids,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from trimode_vlm import TriModeVLM, load
from trimode_vlm.checkpoints import convert

HEAD, EMBEDDING = "diffusion_head.weight", "encoder.embed_tokens.weight"


# FP8


def to_fp8(folder: Path, block: int | None) -> dict[str, torch.Tensor]:
    """Quantise a folder's projections in place, as the Instruct files are; returns what they stand for, in float32."""
    stored = load_file(folder / "model.safetensors")
    meant = {}
    for name in [n for n in stored if n.endswith("_proj.weight") and "vision_tower" not in n]:
        weight = stored[name]
        rows, columns = weight.shape if block is None else (block, block)
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.zeros(grid[0] * rows, grid[1] * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(grid[0], rows, grid[1], columns)
        scale = blocks.abs().amax((1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        dequantised = (quantised.float() * scale[:, None, :, None]).view_as(padded)
        meant[name] = dequantised[: weight.shape[0], : weight.shape[1]]
        flat = quantised.view(torch.uint8).view_as(padded)[: weight.shape[0], : weight.shape[1]].contiguous()
        stored[name] = flat.view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale[0, 0].clone() if block is None else scale
        if block is None:
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": block and [block, block]}
    edit_json(folder / "config.json", dtype="bfloat16", quantization_config=quantization)
    return meant


@pytest.mark.parametrize("block", [None, 32])
def test_fp8(block: int | None, tmp_path: Path) -> None:
    """Per tensor and block-wise; 48 rows do not divide into blocks of 32, so edges count."""
    meant = to_fp8(saved(mistral3(), tmp_path), block)
    ours, _ = load(tmp_path, dtype="float32")
    state = ours.state_dict()
    for name, want in meant.items():
        torch.testing.assert_close(state[name.replace("language_model.model.", "encoder.")], want, atol=1e-7, rtol=1e-6)
    assert not hasattr(ours.config, "quantization_config")
    assert load(tmp_path)[0].dtype == torch.bfloat16


def test_fp8_blocks_of_128(tmp_path: Path) -> None:
    theirs = randomise(LlamaForCausalLM(LlamaConfig(**(TEXT | {"hidden_size": 192, "intermediate_size": 320}))))
    meant = to_fp8(saved(theirs, tmp_path), 128)
    state = load(tmp_path, dtype="float32")[0].state_dict()
    for name, want in meant.items():
        torch.testing.assert_close(state[name.replace("model.", "encoder.", 1)], want, atol=1e-7, rtol=1e-6)


def test_fp8_refusals(tmp_path: Path) -> None:
    folder = saved(mistral3(), tmp_path / "a")
    to_fp8(folder, 32)
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    scale = tensors(folder)[f"{name}_scale_inv"]
    edit_weights(folder, **{f"{name}_scale_inv": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"FP8 weight \[48, 32\] .* needs scales \[2, 1\], found \[3, 3\]"):
        load(folder)
    edit_weights(folder, remove=f"{name}_scale_inv")
    with pytest.raises(ValueError, match="encoder.layers.0.mlp.up_proj.weight: FP8 without its scale"):
        load(folder)
    edit_weights(folder, **{f"{name}_scale_inv": scale})
    load(folder)


# Saving and the Auto classes


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_save_pretrained_round_trip(max_shard_size: str, mistral3_folder: Path, tmp_path: Path) -> None:
    """load and from_pretrained read what save_pretrained wrote, bit for bit: nothing is initialised again."""
    ours, _ = load(mistral3_folder)
    ours.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() is (max_shard_size == "20KB")
    assert set(tensors(tmp_path)) == set(ours.state_dict())
    assert {name.split(".")[0] for name in tensors(tmp_path)} == {"encoder", "diffusion_head"}
    for again in (
        load(tmp_path)[0],
        AutoModelForImageTextToText.from_pretrained(tmp_path),
        TriModeVLM.from_pretrained(tmp_path),
        AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32", device_map="cpu"),
    ):
        assert type(again) is TriModeVLM
        assert_bitwise(again.state_dict(), ours.state_dict())
        mine, theirs = ours.config.to_dict(), again.config.to_dict()
        differing = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
        assert differing <= {"architectures", "_name_or_path"}


def test_text_model_round_trip(llama_folder: Path, tmp_path: Path) -> None:
    ours, _ = load(llama_folder)
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, TriModeVLM) and AutoConfig.from_pretrained(tmp_path).vision_config is None
    assert_bitwise(again.state_dict(), ours.state_dict())
    with torch.no_grad():
        ids = text_ids(1, 20)
        assert torch.equal(again.eval()(input_ids=ids).logits, ours(input_ids=ids).logits)


def test_tied_round_trip_through_from_pretrained(tmp_path: Path) -> None:
    ours, _ = load(saved(mistral3(True), tmp_path / "a"))
    ours.save_pretrained(tmp_path / "b")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "b")
    assert again.diffusion_head.weight is again.encoder.embed_tokens.weight
    assert_bitwise(again.state_dict(), ours.state_dict())


# Conversion


def strip(config: dict[str, Any]) -> dict[str, Any]:
    ignored = ("transformers_version", "use_cache", "type", "attention_dropout")
    return {k: strip(v) if isinstance(v, dict) else v for k, v in config.items() if k not in ignored}


@pytest.mark.parametrize("tie", [False, True])
def test_ministral3_there_and_back(tie: bool, tmp_path: Path) -> None:
    source = saved(mistral3(tie), tmp_path / "source")
    ours = convert(source, tmp_path / "ours", max_shard_size="30KB")
    back = convert(ours, tmp_path / "back", to="mistral3")
    assert_bitwise(tensors(source), tensors(back))
    first, second = (json.loads((f / "config.json").read_text()) for f in (source, back))
    if tie:
        first["text_config"]["tie_word_embeddings"] = True
    assert strip(first) == strip(second)
    from transformers import Mistral3ForConditionalGeneration

    theirs = Mistral3ForConditionalGeneration.from_pretrained(back)
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) is tie
    assert_bitwise(theirs.state_dict(), mistral3(tie).state_dict())


@pytest.mark.parametrize("tie", [False, True])
def test_released_layout(tie: bool, tmp_path: Path) -> None:
    """Other tools expect a head of its own: a tied one becomes a copy, and only here."""
    source = saved(mistral3(tie), tmp_path / "source")
    nld = convert(source, tmp_path / "nld", to="nld")
    config = json.loads((nld / "config.json").read_text())
    assert config["architectures"] == ["NemotronLabsDiffusionVLMModel"] and config["tie_word_embeddings"] is False
    assert config["model_type"] == "nemotron_labs_diffusion_vlm" and "auto_map" not in config
    stored = tensors(nld)
    assert torch.equal(stored[HEAD], stored[EMBEDDING]) is tie
    ours = convert(nld, tmp_path / "ours", to="trimode")
    assert_bitwise(tensors(ours), stored)
    again = convert(ours, tmp_path / "again", to="nld")
    assert_bitwise(tensors(again), stored)
    assert json.loads((again / "config.json").read_text()) == config


TEXT_MODELS = {
    "ministral3": (lambda: Ministral3ForCausalLM(Ministral3Config(**TEXT, rope_parameters=dict(YARN))), "ministral3"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**TEXT)), "llama"),
    "llama tied": (lambda: LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True)), "llama"),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**TEXT, sliding_window=None)), "ministral3"),
}


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_text_models_there_and_back(kind: str, tmp_path: Path) -> None:
    make, to = TEXT_MODELS[kind]
    theirs = randomise(make())
    source = saved(theirs, tmp_path / "source")
    back = convert(convert(source, tmp_path / "ours"), tmp_path / "back", to=to)
    assert_bitwise(tensors(source), tensors(back))
    again = AutoModelForCausalLM.from_pretrained(back).eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        ids = text_ids(1, 100)
        assert torch.equal(again(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_conversion_refuses(llama_folder: Path, mistral3_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot convert to 'gguf'; known: trimode, nld"):
        convert(llama_folder, tmp_path / "x", to="gguf")
    with pytest.raises(ValueError, match="llama is text only"):
        convert(mistral3_folder, tmp_path / "x", to="llama")
    text = saved(Ministral3ForCausalLM(Ministral3Config(**TEXT, rope_parameters=dict(YARN))), tmp_path / "ministral")
    with pytest.raises(ValueError, match="llama has no query scale"):
        convert(text, tmp_path / "x", to="llama")
    assert not (tmp_path / "x").exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="exists"):
        convert(llama_folder, home)
    with pytest.raises(ValueError, match="not a model folder"):
        convert(llama_folder, home, overwrite=True)
    assert (home / "diary.txt").exists()


def test_conversion_leaves_nothing_half_written(llama_copy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from trimode_vlm import checkpoints

    target = convert(llama_copy, tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints.ShardWriter, "close", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(llama_copy, target, overwrite=True, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    monkeypatch.undo()
    convert(llama_copy, target, overwrite=True, dtype="bfloat16")
    assert {t.dtype for t in tensors(target).values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "target"], "no scratch folder stays"
    convert(target, target, overwrite=True, to="nld")
    assert load(target)[0].dtype == torch.bfloat16


# Adapters


def test_peft_lora_on_o_proj(mistral3_folder: Path, tmp_path: Path) -> None:
    """PEFT wraps our model; its saved folder is the draft adapter's layout, which load checks and attaches."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, _ = load(mistral3_folder)
    assert model.draft_adapter is None
    targets = r"encoder\.layers\.\d+\.self_attn\.o_proj"
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    ids = text_ids(1, 12)
    with torch.no_grad():
        adapted = wrapped(input_ids=ids).logits
        with wrapped.disable_adapter():
            plain = wrapped(input_ids=ids).logits
    assert not torch.equal(adapted, plain)
    base = convert(mistral3_folder, tmp_path / "base")
    wrapped.save_pretrained(base / "linear_spec_lora")
    names = set(load_file(base / "linear_spec_lora" / "adapter_model.safetensors"))
    assert "base_model.model.encoder.layers.1.self_attn.o_proj.lora_A.weight" in names and len(names) == 4
    again = PeftModel.from_pretrained(load(base)[0], base / "linear_spec_lora")
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, adapted)

    found = load(base, adapter="auto")[0].draft_adapter
    assert (found.rank, found.scale, len(found.factors)) == (4, 4.0, 2)
    copied = convert(base, tmp_path / "copied")
    assert load(copied, adapter="auto")[0].draft_adapter is not None
    assert load(mistral3_folder, adapter="auto")[0].draft_adapter is None
    with pytest.raises(ValueError, match="no adapter_config.json"):
        load(base, adapter=tmp_path)

    lora = base / "linear_spec_lora"
    factors = load_file(lora / "adapter_model.safetensors")
    lost = factors.pop("base_model.model.encoder.layers.1.self_attn.o_proj.lora_A.weight")
    factors["base_model.model.encoder.layers.7.self_attn.o_proj.lora_A.weight"] = lost
    save_file(factors, lora / "adapter_model.safetensors")
    with pytest.raises(ValueError) as caught:
        load(base, adapter=lora)
    assert "encoder.layers.1.self_attn.o_proj: lora_A or lora_B is missing" in str(caught.value)
    assert "encoder.layers.7.self_attn.o_proj: no such layer" in str(caught.value)

    config = json.loads((lora / "adapter_config.json").read_text())
    for text, words in (
        ('{"r": ', "this is no JSON"),
        ("[]", "must hold a JSON object"),
        (json.dumps(config | {"r": None}), "r and lora_alpha must be numbers, found None"),
        (json.dumps(config | {"lora_alpha": "4"}), "must be numbers, found 4, '4'"),
    ):
        (lora / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            load(base, adapter=lora)
        assert str(lora / "adapter_config.json") in str(caught.value) and "\n" not in str(caught.value)
