"""Loading: names, tying, dtypes, rope forms, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import (
    IMG,
    TEXT,
    VISION,
    YARN,
    assert_bitwise,
    edit_json,
    edit_weights,
    images,
    mistral3,
    randomise,
    saved,
    span,
    tensors,
    text_ids,
)
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from trimode_vlm import TriModeVLM, load
from trimode_vlm.checkpoints import convert

HEAD, EMBEDDING = "diffusion_head.weight", "encoder.embed_tokens.weight"


# Released NLD folders, written here in the released names


def nld_config(vision: bool) -> dict[str, Any]:
    """config.json as released: flat, an `auto_map` that must never run, no field of ours beyond it."""
    kind = "VLMModel" if vision else "Model"
    config = {
        "architectures": [f"NemotronLabsDiffusion{kind}"],
        "auto_map": {"AutoModel": f"modeling_nemotron_labs_diffusion.NemotronLabsDiffusion{kind}"},
        "model_type": "nemotron_labs_diffusion" + ("_vlm" if vision else ""),
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "mask_token_id": 100,
        "block_size": 32,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "rope_parameters": dict(YARN),
        **TEXT,
    }
    if vision:
        config |= {
            "vision_config": dict(VISION),
            "image_token_id": 19,
            "spatial_merge_size": 2,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": False,
            "vision_feature_layer": -1,
        }
    return config


def write_nld(folder: Path, source: Path, vision: bool) -> Path:
    """The weights of a saved Ministral-3 model under the released names."""
    prefixes = {
        "language_model.model.": "encoder.",
        "language_model.lm_head.": "diffusion_head.",
        "vision_tower.": "encoder.vision_tower.",
        "multi_modal_projector.": "encoder.multi_modal_projector.",
    }
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
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
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
        llama_copy,
        remove="model.layers.1.mlp.up_proj.weight",
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


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json",
        "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_damaged_json_file_is_named(llama_copy: Path, name: str) -> None:
    for text, words in (('{"a": ', "no JSON"), ("[1]", "must hold a JSON object, found a list"), ("\xff", "no JSON")):
        (llama_copy / name).write_bytes(text.encode("latin-1"))
        for read in (lambda: load(llama_copy), lambda: convert(llama_copy, llama_copy / "made")):
            with pytest.raises(ValueError, match=words) as caught:
                read()
            assert str(llama_copy / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}'])
def test_an_index_without_a_weight_map(llama_copy: Path, text: str) -> None:
    path = llama_copy / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="has no weight_map from tensors to files") as caught:
        load(llama_copy)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: dict[str, Any] = {}

    def offline(repo_id: str, allow_patterns: list[str], **_: Any) -> str:
        asked.update(repo_id=repo_id, allow_patterns=allow_patterns)
        raise LocalEntryNotFoundError("a long story\nof several lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="cannot be fetched") as caught:
        load("someone/some-model")
    assert "\n" not in str(caught.value)
    assert not any(".py" in pattern or ".bin" in pattern for pattern in asked["allow_patterns"])


def test_options_of_load(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match="quantize must be 'int8', 'int4', '4bit' or left out, got 'int2'"):
        load(llama_folder, quantize="int2")
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
