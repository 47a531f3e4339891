"""Loading, refusing, converting and saving: names, tying, dtypes, FP8, shards, adapters, Auto classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import IMG, TEXT, VISION, YARN, images, mistral3, randomise, saved, span, text_ids
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


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever the number of shards."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_bitwise(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of ... removes its key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def edit_weights(folder: Path, remove: str = "", **add: torch.Tensor) -> None:
    stored = load_file(folder / "model.safetensors") | add
    save_file({k: v for k, v in stored.items() if k != remove}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mistral3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(mistral3(), tmp_path_factory.mktemp("mistral3"))


@pytest.fixture
def llama_copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "llama"))


# Released NLD folders, written here in the released names


def nld_config(vision: bool) -> dict[str, Any]:
    """config.json as released: flat, an `auto_map` that must never run, no field of ours beyond it."""
    kind = "VLMModel" if vision else "Model"
    config = {
        "architectures": [f"NemotronLabsDiffusion{kind}"],
        "auto_map": {"AutoModel": f"modeling_nemotron_labs_diffusion.NemotronLabsDiffusion{kind}"},
        "model_type": "nemotron_labs_diffusion" + ("_vlm" if vision else ""),
        "dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "mask_token_id": 100, "block_size": 32, "attention_bias": False, "mlp_bias": False, "sliding_window": None,
        "rope_parameters": dict(YARN), **TEXT,
    }
    if vision:
        config |= {"vision_config": dict(VISION), "image_token_id": 19, "spatial_merge_size": 2,
                   "projector_hidden_act": "gelu", "multimodal_projector_bias": False, "vision_feature_layer": -1}
    return config


def write_nld(folder: Path, source: Path, vision: bool) -> Path:
    """The weights of a saved Ministral-3 model under the released names."""
    prefixes = {"language_model.model.": "encoder.", "language_model.lm_head.": "diffusion_head.",
                "vision_tower.": "encoder.vision_tower.", "multi_modal_projector.": "encoder.multi_modal_projector."}
    renamed = {}
    for name, tensor in tensors(source).items():
        prefix = next(p for p in prefixes if name.startswith(p))
        if vision or prefix.startswith("language_model"):
            renamed[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(nld_config(vision)))
    return folder


@pytest.mark.parametrize("vision", [True, False])
def test_released_nld(vision: bool, mistral3_folder: Path, tmp_path: Path) -> None:
    """Same weights, same logits as the Ministral-3 model they came from; the Auto classes read the folder as it is."""
    folder = write_nld(tmp_path / "nld", mistral3_folder, vision)
    ours, _ = load(folder, dtype="float32")
    reference, _ = load(mistral3_folder)
    assert (ours.config.vision_config is not None) is vision
    assert (ours.config.mask_token_id, ours.config.block_length) == (100, 32)
    ids = text_ids(1, 90)
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert set(ours.state_dict()) == set(tensors(folder))
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    same = auto.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(same, TriModeVLM)
    assert_bitwise(same.state_dict(), ours.state_dict())


def test_old_rope_form_of_nld(mistral3_folder: Path, tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, as older transformers wrote it."""
    folder = write_nld(tmp_path / "nld", mistral3_folder, False)
    scaling = {k: v for k, v in YARN.items() if k != "rope_theta"}
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=1e4, rope_scaling=scaling)
    ours, reference = load(folder)[0], load(mistral3_folder)[0]
    with torch.no_grad():
        ids = text_ids(1, 90)
        assert torch.equal(ours(input_ids=ids).logits, reference(input_ids=ids).logits)


# Names


def test_new_transformers_names(tmp_path: Path) -> None:
    """save_original_format=False writes the names in memory (`model.language_model.`, `lm_head.`)."""
    theirs = mistral3()
    new = saved(theirs, tmp_path / "new", save_original_format=False)
    assert "model.language_model.norm.weight" in tensors(new) and "lm_head.weight" in tensors(new)
    old = saved(theirs, tmp_path / "old")
    assert "language_model.model.norm.weight" in tensors(old)
    assert_bitwise(load(new)[0].state_dict(), load(old)[0].state_dict())


def test_sharded_source(tmp_path: Path) -> None:
    theirs = mistral3()
    shards = saved(theirs, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    whole = saved(theirs, tmp_path / "whole")
    assert_bitwise(load(shards)[0].state_dict(), load(whole)[0].state_dict())
    next(shards.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="1 of .* weight shards are missing: model-00002"):
        load(shards)


def test_old_names_of_an_unused_buffer(llama_copy: Path) -> None:
    """Old Llama files carry rotary frequencies; they are computed, not loaded."""
    edit_weights(llama_copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(llama_copy)


# RoPE forms, and what cannot be held


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        None,
    ],
)
def test_old_rope_form(rope: dict[str, Any] | None, llama_copy: Path) -> None:
    edit_json(llama_copy / "config.json", rope_parameters=..., rope_theta=5e3, rope_scaling=rope)
    theirs = LlamaForCausalLM.from_pretrained(llama_copy)
    ours, _ = load(llama_copy)
    assert ours.config.rope_parameters["rope_theta"] == 5e3
    with torch.no_grad():
        ids = text_ids(1, 100)
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "MLP biases"),
        ({"model_type": "qwen3"}, "normalises queries and keys"),
        ({"model_type": "qwen2"}, "attention has biases"),
        ({"model_type": "nonsense"}, "known: nemotron_labs_diffusion"),
        ({"model_type": ...}, "model_type None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "siluu"}, "hidden_act 'siluu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
    ],
)
def test_what_the_backbone_cannot_hold(changes: dict[str, Any], message: str, llama_copy: Path) -> None:
    edit_json(llama_copy / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load(llama_copy)


def test_other_activations(tmp_path: Path) -> None:
    theirs = randomise(LlamaForCausalLM(LlamaConfig(**TEXT, hidden_act="gelu")))
    ours, _ = load(saved(theirs, tmp_path))
    with torch.no_grad():
        ids = text_ids(1, 20)
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-4, rtol=0)


def test_sliding_window_shortens_the_context(tmp_path: Path) -> None:
    """Full attention equals a window of 64 up to 64 tokens: the model is held to them, aloud."""
    theirs = randomise(MistralForCausalLM(MistralConfig(**TEXT, sliding_window=64)))
    with pytest.warns(UserWarning, match="sliding_window 64 is smaller than max_position_embeddings 512"):
        ours, _ = load(saved(theirs, tmp_path))
    assert ours.config.max_position_embeddings == 64
    with torch.no_grad():
        ids = text_ids(1, 64)
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-4, rtol=0)


# Tied heads


@pytest.mark.parametrize(
    ("stored_tied", "top", "text", "is_tied"),
    [
        (False, ..., False, False),  # the trap: transformers' default would tie this head
        (False, ..., ..., False),
        (False, False, False, False),
        (True, ..., True, True),
        (True, ..., ..., True),
        (True, False, True, True),
        (True, True, False, True),
    ],
)
def test_tying_is_read_not_assumed(stored_tied: bool, top: Any, text: Any, is_tied: bool, tmp_path: Path) -> None:
    theirs = mistral3(stored_tied)
    config = json.loads((saved(theirs, tmp_path) / "config.json").read_text())
    text_config = {k: v for k, v in (config["text_config"] | {"tie_word_embeddings": text}).items() if v is not ...}
    edit_json(tmp_path / "config.json", tie_word_embeddings=top, text_config=text_config)
    ours, _ = load(tmp_path)
    assert ours.config.tie_word_embeddings is is_tied
    assert torch.equal(ours.diffusion_head.weight, theirs.lm_head.weight)
    assert torch.equal(ours.encoder.embed_tokens.weight, theirs.get_input_embeddings().weight)


def test_a_head_that_is_called_tied_and_is_not(tmp_path: Path) -> None:
    theirs = mistral3(False)
    edit_json(saved(theirs, tmp_path) / "config.json", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="the stored head differs from the embedding"):
        ours, _ = load(tmp_path)
    assert torch.equal(ours.diffusion_head.weight, theirs.lm_head.weight)


def test_a_head_that_is_called_untied_and_absent(llama_copy: Path) -> None:
    edit_weights(llama_copy, remove="lm_head.weight")
    with pytest.raises(ValueError, match=rf"missing \(1\):\n  {HEAD} \[160, 32\]"):
        load(llama_copy)


def test_a_tied_model_is_one_copy_and_saves_one(tmp_path: Path) -> None:
    theirs = randomise(LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True)))
    ours, _ = load(saved(theirs, tmp_path / "a"))
    ours.save_pretrained(tmp_path / "b")
    assert HEAD not in tensors(tmp_path / "b")
    again, _ = load(tmp_path / "b")
    assert again.diffusion_head.weight is again.encoder.embed_tokens.weight
    assert_bitwise(again.state_dict(), ours.state_dict())


# Errors


def test_all_problems_in_one_error(llama_copy: Path) -> None:
    edit_weights(
        llama_copy, remove="model.layers.1.mlp.up_proj.weight",
        **{"model.norm.weight": torch.ones(31), "model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
    )
    with pytest.raises(ValueError) as caught:
        load(llama_copy)
    message = str(caught.value)
    assert "missing (1):\n  encoder.layers.1.mlp.up_proj.weight [48, 32]" in message
    assert "unexpected (1):\n  encoder.layers.0.self_attn.q_norm.weight [16]" in message
    assert "(in the file: model.layers.0.self_attn.q_norm.weight)" in message
    assert "mis-shaped (1):\n  encoder.norm.weight: file [31], model [32]" in message
    model, _ = load(llama_copy, allow_missing=["*.up_proj.weight", "encoder.norm.*"], allow_unexpected=["*.q_norm.*"])
    assert torch.equal(model.encoder.norm.weight, torch.ones(32))
    assert 0 < model.encoder.layers[1].mlp.up_proj.weight.std() < 0.1
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_new_tower_on_a_language_model(llama_folder: Path) -> None:
    """The start of a VLM's training: text weights from the file, tower and projector at random."""
    new = {"vision_config": dict(VISION), "image_token_id": IMG}
    model, _ = load(
        llama_folder, overrides=new, allow_missing=["encoder.vision_tower.*", "encoder.multi_modal_projector.*"]
    )
    assert torch.equal(model.diffusion_head.weight, tensors(llama_folder)["lm_head.weight"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, *span(2, 2)]]), **images((2, 2))).logits
    assert logits.isfinite().all()
    with pytest.raises(ValueError, match="unknown config field 'vision_confg'; nearest: 'vision_config'"):
        load(llama_folder, overrides={"vision_confg": {}})


def test_refused_files(llama_copy: Path, tmp_path: Path) -> None:
    path = llama_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or incomplete safetensors file"):
        load(llama_copy)
    path.unlink()
    with pytest.raises(ValueError, match="no weights found"):
        load(llama_copy)
    (llama_copy / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="never opened: convert them to safetensors"):
        load(llama_copy)
    (llama_copy / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../llama/evil.safetensors"}}')
    with pytest.raises(ValueError, match="shard names must lie in the folder"):
        load(llama_copy)
    with pytest.raises(ValueError, match="no config.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        load(llama_copy / "config.json")
    with pytest.raises(ValueError, match="no folder 'not-there'"):
        load("not-there")


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: dict[str, Any] = {}

    def offline(repo_id: str, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, allow_patterns=allow_patterns)
        raise LocalEntryNotFoundError("a long story\nof several lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="cannot be fetched") as caught:
        load("someone/some-model")
    assert "\n" not in str(caught.value)
    assert not any(".py" in pattern or ".bin" in pattern for pattern in asked["allow_patterns"])


def test_options_of_load(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match="quantize='int8' is not available in this version"):
        load(llama_folder, quantize="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype 'int8' is not one of"):
        load(llama_folder, dtype="int8")
    assert load(llama_folder)[0].dtype == torch.float32
    half, _ = load(llama_folder, dtype="bf16", device="cpu")
    assert half.dtype == half.config.dtype == torch.bfloat16
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not half.training
    source = tensors(llama_folder)["lm_head.weight"]
    assert torch.equal(half.diffusion_head.weight, source.bfloat16())


def test_the_files_own_dtype(tmp_path: Path) -> None:
    saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))).to(torch.bfloat16), tmp_path)
    assert load(tmp_path)[0].dtype == torch.bfloat16


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
        torch.testing.assert_close(
            state[name.replace("language_model.model.", "encoder.")], want, atol=1e-7, rtol=1e-6
        )
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
    assert not hasattr(model, "draft_adapter")
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
