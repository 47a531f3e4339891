"""Tokenizers and processors of foreign folders, spare tokens, Auto classes and pipelines, and memory while loading."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, tiny_config
from foreign_models import IMG, TEXT, VISION, mistral3, randomise, saved
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    pipeline,
)

from trimode_vlm import TriModeProcessor, TriModeVLM, load
from trimode_vlm.checkpoints import convert
from trimode_vlm.cli import main

MINISTRAL_SPECIALS = {0: "<pad>", 1: "<s>", 2: "</s>", IMG: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]"}
MINISTRAL_SPECIALS |= {i: f"<SPECIAL_{i}>" for i in (14, 15, 100, 101)}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_tokenizer(specials: dict[int, str], template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over 160 ids, of which `specials` are special tokens."""
    words = {specials.get(i, f"w{i}"): i for i in range(TEXT["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="w20"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(specials.values()))
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    roles = {role: text for role, text in roles.items() if text in words}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **roles)


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def ministral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Ministral-3 folder as transformers saves it: weights, tokenizer, PixtralProcessor."""
    folder = saved(mistral3(), tmp_path_factory.mktemp("ministral"))
    image_processor = PixtralImageProcessor(size={"longest_edge": 140}, patch_size={"height": 14, "width": 14})
    tokenizer = make_tokenizer(MINISTRAL_SPECIALS)
    PixtralProcessor(
        image_processor, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


def test_ministral_processor(ministral_folder: Path) -> None:
    """The same ids and pixels as PixtralProcessor, for a small, a wide and a too large picture."""
    model, ours = load(ministral_folder)
    assert isinstance(ours, TriModeProcessor)
    assert (model.config.mask_token_id, model.config.image_token_id) == (100, IMG)
    assert (model.config.image_start_token_id, model.config.image_break_token_id) == (None, 12)
    theirs = AutoProcessor.from_pretrained(ministral_folder)
    assert isinstance(theirs, PixtralProcessor)
    for size in ((30, 50), (139, 20), (300, 190)):
        mine = ours(text="<s> w30 [IMG] w31", images=[picture(*size)], add_special_tokens=False)
        reference = theirs(text="<s> w30 [IMG] w31", images=[picture(*size)], add_special_tokens=False)
        assert mine["input_ids"].tolist() == reference["input_ids"].tolist()
        assert mine["image_sizes"].tolist() == reference["image_sizes"].tolist()
        torch.testing.assert_close(mine["pixel_values"], reference["pixel_values"], atol=1e-5, rtol=0)


def test_ministral_processor_there_and_back(ministral_folder: Path, tmp_path: Path) -> None:
    ours = convert(ministral_folder, tmp_path / "ours")
    processor = AutoProcessor.from_pretrained(ours)
    assert isinstance(processor, TriModeProcessor) and processor.image_token == "[IMG]"
    inputs = processor(text="w30 [IMG] w31", images=[picture(60, 60)])
    assert load(ours)[1](text="w30 [IMG] w31", images=[picture(60, 60)])["input_ids"].equal(inputs["input_ids"])
    nld = convert(ours, tmp_path / "nld", to="nld")
    assert load(nld)[1].image_processor.resize_rule == "pixtral"
    back = AutoProcessor.from_pretrained(convert(ours, tmp_path / "back", to="ministral3"))
    assert isinstance(back, PixtralProcessor)
    again = back(text="w30 [IMG] w31", images=[picture(60, 60)])
    assert again["input_ids"].tolist() == inputs["input_ids"].tolist()
    assert back.chat_template == TEMPLATE


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_damaged_chat_template_is_named(ministral_folder: Path, tmp_path: Path, name: str) -> None:
    """When the folder is loaded, not at the first question, and whatever file it lies in."""
    folder = Path(shutil.copytree(ministral_folder, tmp_path / "copy"))
    for text, words in (
        ("{% for message in messages %}\n{{ message['content'] }", "no valid Jinja, line 2: "),
        ("{{ messages | backwards }}", "no valid Jinja, line 1: No filter named 'backwards'"),
    ):
        settings = json.loads((folder / name).read_text()) if name == "tokenizer_config.json" else {}
        written = text if name.endswith(".jinja") else json.dumps(settings | {"chat_template": text})
        (folder / name).write_text(written)
        for read in (lambda: load(folder), lambda: convert(folder, tmp_path / "made")):
            with pytest.raises(ValueError, match=words) as caught:
                read()
            assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)
    if name == "chat_template.jinja":
        (folder / name).write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match="this is no text"):
            load(folder)
        (folder / name).write_text("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}")
        load(folder)


def test_a_damaged_template_among_several(ministral_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ministral_folder, tmp_path / "copy"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"tool\.jinja: the chat template is no valid Jinja"):
        load(folder)
    shutil.rmtree(folder / "additional_chat_templates")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for templates in ([{"name": "default", "template": "{{"}], [{"name": "default", "template": 5}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: the chat template"):
            load(folder)


CONTENT = [{"type": "image", "image": picture(60, 40)}, {"type": "text", "text": " w30"}]
MESSAGES = [{"role": "user", "content": CONTENT}]


def test_auto_classes_and_pipeline(ministral_folder: Path, tmp_path: Path) -> None:
    """What `load` gives, transformers' Auto classes and its pipeline give too."""
    folder = convert(ministral_folder, tmp_path / "ours")
    model, processor = load(folder)
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template(MESSAGES, **options)
    expected = model.generate(**inputs, max_new_tokens=6).sequences
    auto_inputs = AutoProcessor.from_pretrained(folder).apply_chat_template(MESSAGES, **options)
    auto_model = AutoModelForImageTextToText.from_pretrained(folder)
    assert torch.equal(auto_model.generate(**auto_inputs, max_new_tokens=6).sequences, expected)
    answer = processor.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ask = pipeline("image-text-to-text", model=str(folder), device="cpu")
    out = ask(text=MESSAGES, max_new_tokens=6, return_full_text=False)
    assert out[0]["generated_text"].split() == answer.split() and len(answer.split()) > 1


def test_nano_for_transformers_alone(tmp_path: Path) -> None:
    """A layout with a start token, which PixtralProcessor does not know: the converted chat template writes it."""
    folder = convert("nano", tmp_path / "nano", to="ministral3")
    theirs, ours = AutoProcessor.from_pretrained(folder), load("nano")[1]
    assert isinstance(theirs, PixtralProcessor)
    parts = [{"type": "image", "image": picture(84, 112)}, {"type": "text", "text": "What?"}]
    parts += [{"type": "image", "image": picture(28, 28)}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A grid."}, *MESSAGES[:1]]
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    mine, other = (processor.apply_chat_template(messages, **options) for processor in (ours, theirs))
    assert ours.image_start_token in ours.decode(mine["input_ids"][0])
    assert mine["input_ids"].tolist() == other["input_ids"].tolist()
    assert mine["image_sizes"].tolist() == other["image_sizes"].tolist()
    again = load(folder)[1].apply_chat_template(messages, **options)
    assert again["input_ids"].tolist() == mine["input_ids"].tolist()
    options = {"max_new_tokens": 4, "do_sample": False}
    answer = AutoModelForImageTextToText.from_pretrained(folder).generate(**mine, **options)
    assert answer.tolist() == load("nano")[0].generate(**mine, mode="ar", **options).sequences.tolist()


@pytest.mark.parametrize("change", ["template", "layout"])
def test_what_a_pixtral_processor_cannot_say(ministral_folder: Path, tmp_path: Path, change: str, capsys: Any) -> None:
    """A start token that the template cannot be made to write, or a break behind the last row: said in one line."""
    ours = convert(ministral_folder, tmp_path / "ours")
    config = json.loads((ours / "processor_config.json").read_text())
    config |= {"image_start_token": "<SPECIAL_14>"} if change == "template" else {"break_after_last": True}
    (ours / "processor_config.json").write_text(json.dumps(config))
    (ours / "chat_template.jinja").write_text(TEMPLATE.replace("[IMG]", "{{ '[IM' + 'G]' }}"))
    assert main(["convert", str(ours), str(tmp_path / "back"), "--to", "ministral3"]) == 0
    written = capsys.readouterr()
    assert written.out == f"{tmp_path / 'back'}\n"
    [line] = [line for line in written.err.splitlines() if not line.startswith("settings: ")]
    assert line.startswith("processor: none, since PixtralProcessor cannot say this image layout")
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert not (tmp_path / "back" / "processor_config.json").exists()


@pytest.mark.parametrize(
    ("specials", "mask", "image"),
    [
        # SmolLM2: no mask, no reserved names: the first special token without a role, images behind it.
        ({0: "<pad>", 1: "<s>", 2: "</s>", 3: "<repo>", 4: "<file>", 5: "<x>", 6: "<y>", 7: "<z>"}, 3, 4),
        # Llama 3: reserved tokens before others, whatever their order.
        ({0: "<pad>", 1: "<s>", 2: "</s>", 3: "<tool>", 90: "<|reserved_special_token_0|>"}, 90, None),
        # The tokenizer's own names win.
        ({1: "<s>", 2: "</s>", 5: "<|mask|>", 9: "<|reserved_special_token_0|>", 30: "<|image_pad|>"}, 5, 30),
        # A token of the chat template is not spare.
        ({0: "<pad>", 1: "<s>", 2: "</s>", 3: "[IMG]", 8: "<free>"}, 8, 3),
    ],
)
def test_spare_tokens(specials: dict[int, str], mask: int, image: int | None, tmp_path: Path) -> None:
    saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path)
    make_tokenizer(specials).save_pretrained(tmp_path)
    model, processor = load(tmp_path)
    assert (model.config.mask_token_id, model.config.image_token_id) == (mask, image)
    assert processor.mask_token == specials[mask]
    fillers = {TEXT["pad_token_id"], TEXT["bos_token_id"]}
    banned = set(model.config.never_sampled_ids)
    assert banned - fillers == {mask}, "a text-only model has no image tokens to forbid"
    assert load(tmp_path, mask_token_id=33)[0].config.mask_token_id == 33


def test_no_spare_token(tmp_path: Path) -> None:
    """Nothing is invented: decoding with blocks then asks for a mask."""
    saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path)
    make_tokenizer({0: "<pad>", 1: "<s>", 2: "</s>"}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="pass mask_token_id="):
        model, _ = load(tmp_path)
    assert model.config.mask_token_id is None
    with pytest.raises(ValueError, match="needs a mask token"):
        model.generate(input_ids=torch.tensor([[1, 30]]), mode="linear_spec", max_new_tokens=4)


def test_a_new_tower_gets_image_tokens(tmp_path: Path) -> None:
    specials = {0: "<pad>", 1: "<s>", 2: "</s>", **{i: f"<x{i}>" for i in range(3, 9)}}
    saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path)
    make_tokenizer(specials).save_pretrained(tmp_path)
    model, processor = load(
        tmp_path,
        overrides={"vision_config": dict(VISION)},
        allow_missing=["encoder.vision_tower.*", "encoder.multi_modal_projector.*"],
    )
    assert processor.image_token == "<x4>" and processor.image_start_token == "<x5>"
    inputs = processor(text="<x4> w30", images=[picture(60, 30)])
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_foreign_generation_settings(tmp_path: Path) -> None:
    """Several end tokens arrive; what no decoder here takes is left out, so that generate works."""
    saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path)
    settings = {"eos_token_id": [2, 7], "repetition_penalty": 1.1, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model, _ = load(tmp_path)
    assert model.generation_config.end_token_ids == {2, 7} and model.generation_config.do_sample is True
    model.generate(input_ids=torch.tensor([[1, 30]]), max_new_tokens=3, seed=0)
    model.save_pretrained(tmp_path / "again")
    again, _ = load(tmp_path / "again")
    assert again.generation_config.to_dict() == model.generation_config.to_dict()


def test_timm_tower(tmp_path: Path) -> None:
    """A tower with running statistics: buffers, and its integer counters, come back bit for bit."""
    timm = pytest.importorskip("timm")
    architecture = "test_efficientnet"
    assert timm.is_model(architecture)
    vision = {"model_type": "timm_encoder", "architecture": architecture, "patch_size": 32, "image_size": 64}
    torch.manual_seed(0)
    model = TriModeVLM(tiny_config(vision_config=vision))
    with torch.no_grad():
        model.encoder.vision_tower.train()(torch.randn(4, 3, 64, 64))
    model.eval().save_pretrained(tmp_path / "a")
    for folder in (tmp_path / "a", convert(tmp_path / "a", tmp_path / "b")):
        state = load(folder)[0].state_dict()
        assert any(tensor.dtype == torch.int64 for tensor in state.values())
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    half, _ = load(tmp_path / "a", dtype="bfloat16")
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model.encode_images(pixels)[0]
        torch.testing.assert_close(half.encode_images(pixels)[0].float(), want, atol=0.05, rtol=0.1)
    with pytest.raises(ValueError, match="ministral3 holds a Pixtral tower only"):
        convert(tmp_path / "a", tmp_path / "c", to="ministral3")


MEASURE = """
import sys
from pathlib import Path
from typing import Any
from trimode_vlm import load

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024

small, large = sys.argv[1:]
load(small)  # what imports and first calls take is not measured
kept = []
for dtype in ("float32", "float16"):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    kept.append(load(large, dtype=dtype)[0])
    model_bytes = sum(p.numel() * p.element_size() for p in kept[-1].parameters())
    print("copies", (peak_bytes() - before) / model_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak of memory")
def test_memory_while_loading(tmp_path: Path) -> None:
    """About one copy of the model, not the file beside it; in a process of its own, since freed memory is reused."""
    large = TEXT | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    saved(LlamaForCausalLM(LlamaConfig(**TEXT)), tmp_path / "small")
    saved(LlamaForCausalLM(LlamaConfig(**large)), tmp_path / "large")
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    copies = [float(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("copies")]
    assert len(copies) == 2 and all(0.7 < c < 1.3 for c in copies), copies
