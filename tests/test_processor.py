"""Chats to tensors: the same ids as transformers, special tokens that nobody can type, labels from the template."""

from __future__ import annotations

import base64
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processor_cases import (
    CHATML,
    CHATML_TEXT_ONLY,
    CHATML_THINKING,
    chatml_tokenizer,
    mistral_tokenizer,
    random_text,
    sentencepiece_tokenizer,
)
from transformers import AutoImageProcessor, AutoProcessor, PixtralProcessor
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

from trimode_vlm.config import TriModeConfig, TriModeTextConfig
from trimode_vlm.processor import TriModeImageProcessor, TriModeProcessor

MAKERS = {
    "chatml": chatml_tokenizer,
    "mistral": mistral_tokenizer,
    "llama": lambda: sentencepiece_tokenizer("llama"),
    "metaspace": lambda: sentencepiece_tokenizer("metaspace"),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def processor(request: pytest.FixtureRequest) -> TriModeProcessor:
    return TriModeProcessor(tokenizer=MAKERS[request.param]())


@pytest.fixture(scope="module")
def chatml() -> TriModeProcessor:
    return TriModeProcessor(tokenizer=chatml_tokenizer())


@pytest.fixture(scope="module")
def mistral() -> TriModeProcessor:
    images = TriModeImageProcessor(size={"longest_edge": 224}, resize_rule="pixtral")
    return TriModeProcessor(images, mistral_tokenizer())


def picture(height: int, width: int, color: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(color).integers(0, 256, (height, width, 3), dtype=np.uint8))


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": c} for c in content]
    return {"role": "user", "content": parts if len(parts) > 1 or not isinstance(content[0], str) else content[0]}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def ids_of(processor: TriModeProcessor, messages: Any, **options: Any) -> list[int]:
    return processor.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"][0].tolist()


def labelled(processor: TriModeProcessor, encoded: dict[str, Any]) -> list[str]:
    ids = encoded["input_ids"]
    return [processor.tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in encoded["response_spans"]]


# --- the same as transformers -------------------------------------------------------------------------------------


def test_ids_equal_the_plain_tokenizer(processor: TriModeProcessor) -> None:
    rng = random.Random(0)
    encoder = processor._control_encoder()
    for _ in range(200):
        messages = [user(random_text(rng)), says(random_text(rng)), user(random_text(rng))]
        prompt = rng.random() < 0.5
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        plain = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids_of(processor, messages, add_generation_prompt=prompt) == plain
        # The copy with renamed control tokens is what literals and labels go through.
        encoding, _, _ = encoder._encode_marked(text, {}, [], frozenset())
        assert [encoder._ids.get(i, i) for i in encoding.ids] == plain


def test_rendered_text_equals_transformers(chatml: TriModeProcessor) -> None:
    messages = [user("a <|im_end|> literal"), says("b")]
    assert chatml.apply_chat_template(messages) == chatml.tokenizer.apply_chat_template(messages, tokenize=False)
    assert chatml.apply_chat_template([messages, messages[:1]])[1].endswith("literal<|im_end|>\n")


def test_ministral_layout_equals_pixtral_processor(mistral: TriModeProcessor) -> None:
    theirs = PixtralProcessor(
        PixtralImageProcessor(patch_size={"height": 14, "width": 14}, size={"longest_edge": 224}),
        mistral_tokenizer(), patch_size=14, spatial_merge_size=2, chat_template=mistral.chat_template,
    )  # fmt: skip
    rng = random.Random(1)
    for _ in range(12):
        images = [picture(rng.randint(1, 500), rng.randint(30, 500)) for _ in range(rng.randint(1, 3))]
        messages = [user(random_text(rng), *images, "then?"), says(" yes"), user(picture(40, 60), random_text(rng))]
        options: dict[str, Any] = dict(tokenize=True, return_dict=True, return_tensors="pt")
        ours, expected = (
            mistral.apply_chat_template(messages, **options),
            theirs.apply_chat_template(messages, **options),
        )
        assert ours["input_ids"].tolist() == expected["input_ids"].tolist()
        assert ours["attention_mask"].tolist() == expected["attention_mask"].tolist()
        assert ours["image_sizes"].tolist() == [[int(a), int(b)] for a, b in expected["image_sizes"]]
        torch.testing.assert_close(ours["pixel_values"], expected["pixel_values"], atol=1e-5, rtol=0)
        text, flat = theirs.apply_chat_template(messages), [*images, picture(40, 60)]
        assert mistral(text=text, images=flat)["input_ids"].tolist() == ours["input_ids"].tolist()
        bare = text.removeprefix("<s>")
        assert (
            mistral(text=bare, images=flat)["input_ids"].tolist()
            == theirs(text=bare, images=flat)["input_ids"].tolist()
        )


def test_released_layout(chatml: TriModeProcessor) -> None:
    ids = ids_of(chatml, [user("a", picture(56, 84), "b", picture(1, 1))])
    text = chatml.tokenizer.decode(ids)
    row = "<|image_pad|>" * 3
    first = f"<|image_start|>{row}<|image_break|>{row}<|image_end|>"
    assert text == f"<|im_start|>user\na{first}b<|image_start|><|image_pad|><|image_end|><|im_end|>\n"


def test_start_and_end_written_by_the_template_are_not_doubled() -> None:
    template = CHATML.replace("{{ '<|image_pad|>' }}", "{{ '<|image_start|><|image_pad|><|image_end|>' }}")
    plain = TriModeProcessor(tokenizer=chatml_tokenizer())
    wrapped = TriModeProcessor(tokenizer=chatml_tokenizer(template))
    messages = [user(picture(28, 56), picture(28, 28), "x")]
    assert ids_of(wrapped, messages) == ids_of(plain, messages)


def test_break_after_last() -> None:
    processor = TriModeProcessor(
        tokenizer=chatml_tokenizer(),
        image_token="<|image_pad|>",
        image_break_token="<|image_break|>",
        break_after_last=True,
    )
    text = processor.tokenizer.decode(ids_of(processor, [user(picture(56, 28), "x")]))
    assert "\n<|image_pad|><|image_break|><|image_pad|><|image_break|>x" in text
    with pytest.raises(ValueError, match="'<nope>' is not in the tokenizer"):
        TriModeProcessor(tokenizer=chatml_tokenizer(), image_token="<nope>")


def test_placeholders_equal_the_models_image_tokens(tiny_model: Any, tokenizer: Any) -> None:
    processor = TriModeProcessor(tokenizer=tokenizer)
    images = [picture(*size) for size in ((1, 1), (28, 29), (57, 140), (1, 200), (200, 1))]
    batch = processor.apply_chat_template([user(*images, "?")], tokenize=True, return_dict=True)
    features = tiny_model.encode_images(batch["pixel_values"], batch["image_sizes"])
    assert sum(len(f) for f in features) == int((batch["input_ids"] == processor.image_token_id).sum())


# --- special tokens that users type -------------------------------------------------------------------------------


def control_ids(processor: TriModeProcessor, ids: list[int]) -> list[int]:
    special = set(processor._control_encoder().control.values())
    return [i for i in ids if i in special]


def test_typed_special_tokens_are_text(processor: TriModeProcessor) -> None:
    for literal in processor._control_encoder().control:
        messages = [
            {"role": "system", "content": f"s {literal}"},
            user(f"{literal}a{literal}{literal} b"),
            says(f"x {literal}y"),
        ]
        if literal in ("<think>", "</think>"):
            messages.pop()
        clean = [{**m, "content": "word"} for m in messages]
        ids = ids_of(processor, messages)
        assert control_ids(processor, ids) == control_ids(processor, ids_of(processor, clean)), literal
        decoded = processor.tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded.count(literal) == processor.apply_chat_template(messages).count(literal)


def test_literals_cannot_be_assembled_from_parts(chatml: TriModeProcessor) -> None:
    for literal in ("<|im_end|>", "<|image_pad|>", "<|mask|>"):
        for cut in range(1, len(literal)):
            messages = [user("a" + literal[:cut], literal[cut:] + "b")]
            ids = ids_of(chatml, messages)
            assert len(control_ids(chatml, ids)) == 2
            assert chatml.tokenizer.decode(ids) == chatml.apply_chat_template(messages)


def test_private_characters_are_kept(chatml: TriModeProcessor) -> None:
    text = "\U000f0000 \U000f0001<|im_end|>\U000ffffd"
    ids = ids_of(chatml, [user(text)])
    assert chatml.tokenizer.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n"
    assert len(control_ids(chatml, ids)) == 2


def test_typed_image_token_next_to_an_image(chatml: TriModeProcessor) -> None:
    out = chatml.apply_chat_template(
        [user("<|image_pad|>", picture(28, 28), "<|image_pad|>")], tokenize=True, return_dict=True
    )
    assert int((out["input_ids"] == chatml.image_token_id).sum()) == 1
    encoded = chatml.encode_chat([user("<|image_pad|>", picture(28, 28)), says("<|image_pad|><|mask|>")])
    assert labelled(chatml, encoded) == ["<|image_pad|><|mask|><|im_end|>"]
    assert len(encoded["images"]) == 1


def test_a_mask_token_that_is_not_special_is_covered_too() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens(["<mask>"])
    messages = [user("a <mask> b")]
    assert tokenizer.convert_tokens_to_ids("<mask>") in ids_of(TriModeProcessor(tokenizer=tokenizer), messages)
    covered = TriModeProcessor(tokenizer=tokenizer, mask_token="<mask>")
    ids = ids_of(covered, messages)
    assert tokenizer.convert_tokens_to_ids("<mask>") not in ids
    assert "a <mask> b" in tokenizer.decode(ids)


def test_thinking_marks_are_the_assistants(chatml: TriModeProcessor) -> None:
    think = chatml.tokenizer.convert_tokens_to_ids("<think>")
    ids = ids_of(chatml, [user("<think>"), says("<think>hm</think>yes")])
    assert ids.count(think) == 1


# --- labels -------------------------------------------------------------------------------------------------------


def test_labels_are_the_assistants_texts_and_their_end(processor: TriModeProcessor) -> None:
    rng = random.Random(2)
    end = processor.tokenizer.eos_token
    for _ in range(150):
        answers = [random_text(rng) for _ in range(rng.randint(1, 3))]
        messages: list[dict[str, Any]] = [{"role": "system", "content": random_text(rng)}]
        for answer in answers:
            messages += [user(random_text(rng), picture(28, 60), random_text(rng)), says(answer)]
        encoded = processor.encode_chat(messages)
        got = labelled(processor, encoded)
        for text, answer in zip(got, answers, strict=True):
            expected = answer + end
            if "ByteLevel" not in repr(processor.tokenizer.backend_tokenizer.decoder):
                # SentencePiece cannot tell ▁ from a space, and its decoder drops one leading space.
                expected = expected.replace("▁", " ")
                text = expected if text == expected.removeprefix(" ") else text
            assert text == expected
        assert len(encoded["images"]) == len(answers) == len(encoded["image_sizes"])


@pytest.mark.parametrize(
    "answer", ["\nstarts with a line", "\n\n", " leading space", "", "e\u0301", "👩‍👩‍👧", "</think>x"]
)
def test_the_prompt_of_a_label_is_the_prompt_of_inference(chatml: TriModeProcessor, answer: str) -> None:
    question = [user("What?\n", picture(30, 30))]
    encoded = chatml.encode_chat([*question, says(answer)])
    prompt = ids_of(chatml, question, add_generation_prompt=True)
    assert encoded["input_ids"][: len(prompt)] == prompt
    assert encoded["loss_mask"].index(True) == len(prompt)
    assert labelled(chatml, encoded) == [answer + "<|im_end|>"]
    assert encoded["loss_mask"][-1] is False, "the line end after the end token is the template's"


def test_messages_can_be_left_out_of_training(chatml: TriModeProcessor) -> None:
    messages = [user("a"), says("one", train=False), user("b"), says("two"), user("c"), says("three", train=True)]
    assert labelled(chatml, chatml.encode_chat(messages)) == ["two<|im_end|>", "three<|im_end|>"]
    assert not any(chatml.encode_chat([user("a")], add_generation_prompt=True)["loss_mask"])


def test_empty_thinking_block_stands_before_the_answer_as_at_inference() -> None:
    processor = TriModeProcessor(tokenizer=chatml_tokenizer(CHATML_THINKING))
    question = [user("a"), says("one"), user("b")]
    prompt = processor.apply_chat_template(question, add_generation_prompt=True)
    assert prompt.endswith("assistant\n<think></think>")
    thinking = processor.apply_chat_template(question, add_generation_prompt=True, enable_thinking=True)
    assert thinking.endswith("assistant\n")
    encoded = processor.encode_chat([*question, says("two")])
    assert labelled(processor, encoded) == ["one<|im_end|>", "two<|im_end|>"]
    assert processor.tokenizer.decode(encoded["input_ids"]).endswith("assistant\n<think></think>two<|im_end|>\n")
    own = processor.encode_chat([user("a"), says("<think>hm</think>b")])
    assert labelled(processor, own) == ["<think>hm</think>b<|im_end|>"]


@pytest.mark.parametrize(
    "template,reason",
    [
        (CHATML.split("{% if add_generation_prompt %}")[0], "support add_generation_prompt"),
        (CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>bot\n{% endif %}"), "not a prefix"),
        (CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "> "), "end token"),
        ("{{ messages | length }} " + CHATML, "not a prefix"),
    ],
)
def test_answers_that_cannot_be_located(template: str, reason: str) -> None:
    processor = TriModeProcessor(tokenizer=chatml_tokenizer(template))
    with pytest.raises(ValueError, match=f"message 1: .*{reason}"):
        processor.encode_chat([user("a"), says("b")])


def test_assistant_masks_of_transformers(chatml: TriModeProcessor) -> None:
    messages = [[user(picture(28, 60), "a"), says("one")], [user("longer text"), says("two")]]
    out = chatml.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    for row, single in enumerate(messages):
        mask = chatml.encode_chat(single)["loss_mask"]
        assert out["assistant_masks"][row, -len(mask) :].tolist() == [int(m) for m in mask]


# --- truncation ---------------------------------------------------------------------------------------------------


def test_truncation_never_cuts_an_image(chatml: TriModeProcessor) -> None:
    messages = [
        user("text", picture(56, 56)),
        says("one two three"),
        user(picture(28, 84, 1), "more"),
        says("four five"),
    ]
    whole = chatml.encode_chat(messages)
    first_answer = whole["loss_mask"].index(True)
    for limit in range(1, len(whole["input_ids"]) + 2):
        if limit <= first_answer:
            with pytest.raises(ValueError, match=f"cut to {limit} leave no trained token"):
                chatml.truncate_chat(whole, limit)
            continue
        cut = chatml.truncate_chat(whole, limit)
        size = len(cut["input_ids"])
        assert size <= limit and cut["input_ids"] == whole["input_ids"][:size] and len(cut["loss_mask"]) == size
        expected = sum((h // 28) * (w // 28) for h, w in cut["image_sizes"])
        assert cut["input_ids"].count(chatml.image_token_id) == expected
        assert len(cut["images"]) == len(cut["image_sizes"]) == len(cut["image_spans"])
        assert (
            cut["input_ids"].count(chatml.layout.start)
            == cut["input_ids"].count(chatml.layout.end)
            == len(cut["images"])
        )


def test_prompts_are_truncated_only_in_text(chatml: TriModeProcessor) -> None:
    whole = ids_of(chatml, [user(picture(28, 28), "a long question")])
    assert ids_of(chatml, [user(picture(28, 28), "a long question")], truncation=True, max_length=12) == whole[:12]
    with pytest.raises(ValueError, match="max_length = 6 cuts into the images"):
        ids_of(chatml, [user("a", picture(56, 56))], truncation=True, max_length=6)
    left = ids_of(chatml, [user("a long question")], truncation=True, max_length=5, truncation_side="left")
    assert left == ids_of(chatml, [user("a long question")])[-5:]


@pytest.mark.parametrize("kind", ["chatml", "mistral"])
@pytest.mark.parametrize("ending", ["prompt", "answer"])
def test_truncation_keeps_the_end_to_go_on_from(request: pytest.FixtureRequest, kind: str, ending: str) -> None:
    """Cut at the right, a prompt would lose the answer's header or its begun text: refused; at the left they stay."""
    processor = request.getfixturevalue(kind)
    chat = [user("a question of some length")]
    options: dict[str, Any] = {"add_generation_prompt": True}
    if ending == "answer":
        chat, options = [*chat, says("It begins with")], {"continue_final_message": True}
    whole = ids_of(processor, chat, **options)
    options["truncation"] = True
    limit = len(whole) - 1
    for cut in (limit, 3):
        words = f"max_length = {cut} would cut the end of a prompt of {len(whole)} tokens"
        with pytest.raises(ValueError, match=words):
            ids_of(processor, chat, max_length=cut, **options)
    assert ids_of(processor, chat, max_length=limit, truncation_side="left", **options) == whole[1:]
    assert ids_of(processor, chat, max_length=len(whole), **options) == whole
    assert ids_of(processor, chat[:1], truncation=True, max_length=3) == ids_of(processor, chat[:1])[:3]


# --- conventions --------------------------------------------------------------------------------------------------


def test_sources_inside_messages(chatml: TriModeProcessor, tmp_path: Path) -> None:
    image = picture(30, 70)
    path = tmp_path / "a.png"
    image.save(path)
    text = base64.b64encode(path.read_bytes()).decode()
    uri = f"data:image/png;base64,{text}"
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": image}, {"type": "image", "image": str(path)}, {"type": "image", "path": path},
        {"type": "image", "url": uri}, {"type": "image", "url": path.as_uri()}, {"type": "image", "base64": text},
        {"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": uri},
    ]  # fmt: skip
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    before = json.dumps(messages, default=str)
    out = chatml.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert json.dumps(messages, default=str) == before, "the user's messages stay as they are"
    assert out["pixel_values"].shape == (8, 3, 56, 84)
    assert all(torch.equal(row, out["pixel_values"][0]) for row in out["pixel_values"])
    encoded = chatml.encode_chat([*messages, says("yes")])
    assert len(encoded["images"]) == 8 and encoded["image_sizes"] == [(56, 84)] * 8
    given = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    separate = chatml.apply_chat_template(given, tokenize=True, return_dict=True, processor_kwargs={"images": [image]})
    assert torch.equal(separate["pixel_values"], out["pixel_values"][:1])


def test_history_keeps_its_images_in_order(chatml: TriModeProcessor) -> None:
    images = [picture(28, 28 * k, k) for k in range(1, 5)]
    messages = [user(images[0], images[1]), says("a"), user("b", images[2]), says("c"), user(images[3], "d")]
    out = chatml.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert out["image_sizes"].tolist() == [[28, 28], [28, 56], [28, 84], [28, 112]]
    batch = chatml.apply_chat_template([messages, [user("x")], messages[:1]], tokenize=True, return_dict=True)
    assert batch["image_sizes"][:, 1].tolist() == [28, 56, 84, 112, 28, 56]


def test_batches_are_padded_on_the_left(processor: TriModeProcessor) -> None:
    chats = [[user("a much longer question", picture(28, 56), "?")], [user("b")], [user(picture(84, 28), "c")]]
    out = processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)
    for row, chat in enumerate(chats):
        alone = ids_of(processor, chat, add_generation_prompt=True)
        assert out["input_ids"][row, -len(alone) :].tolist() == alone
        assert out["attention_mask"][row].sum() == len(alone) == out["attention_mask"][row, -len(alone) :].sum()
        assert set(out["input_ids"][row, : -len(alone)].tolist()) <= {processor.tokenizer.pad_token_id}
    assert set(out) == {"input_ids", "attention_mask", "pixel_values", "image_sizes"}
    right = processor.apply_chat_template(
        chats, tokenize=True, return_dict=True, padding_side="right", pad_to_multiple_of=64
    )
    assert right["input_ids"].shape[1] % 64 == 0 and right["attention_mask"][:, 0].all()
    lists = processor.apply_chat_template(chats, tokenize=True, return_dict=True, return_tensors=None)
    assert isinstance(lists["input_ids"][0], list) and len({len(row) for row in lists["input_ids"]}) > 1


def test_text_only_has_no_image_keys(chatml: TriModeProcessor) -> None:
    for out in (
        chatml.apply_chat_template([user("hi")], tokenize=True, return_dict=True),
        chatml(text="hi"),
        chatml(text=["hi", "longer than that"]),
    ):
        assert set(out) == {"input_ids", "attention_mask"}
    assert chatml(text=["hi", "longer than that"])["attention_mask"][0, 0] == 0
    assert set(chatml(images=picture(3, 3))) == {"pixel_values", "image_sizes"}
    assert chatml.apply_chat_template([user("hi")], tokenize=True).shape[0] == 1


def test_templates_that_read_only_text_or_only_parts() -> None:
    messages = [{"role": "system", "content": [{"type": "text", "text": "s"}]}, user("a", picture(28, 28)), says("b")]
    reference = TriModeProcessor(tokenizer=chatml_tokenizer())
    only_parts = CHATML.replace("{% if m.content is string %}{{ m.content }}{% else %}", "{% if true %}")
    for template in (CHATML_TEXT_ONLY, only_parts):
        processor = TriModeProcessor(tokenizer=chatml_tokenizer(template))
        assert ids_of(processor, messages) == ids_of(reference, messages)
        assert labelled(processor, processor.encode_chat(messages)) == ["b<|im_end|>"]


def test_continue_final_message(chatml: TriModeProcessor) -> None:
    messages = [user("a <|im_end|>"), says("Hello wor")]
    ids = ids_of(chatml, messages, continue_final_message=True)
    assert chatml.tokenizer.decode(ids).endswith("<|im_start|>assistant\nHello wor")


def test_pipeline(chat_model: Any, tokenizer: Any) -> None:
    from transformers import pipeline

    processor = TriModeProcessor(tokenizer=tokenizer)
    pipe = pipeline("image-text-to-text", model=chat_model, processor=processor)
    messages = [user(picture(28, 56), "what?")]
    out = pipe(text=messages, max_new_tokens=3, return_full_text=False)
    assert isinstance(out[0]["generated_text"], str)
    full = pipe(text=messages, max_new_tokens=3)
    assert full[0]["generated_text"][-1]["role"] == "assistant"


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages,reason",
    [
        ([], "non-empty"),
        ("hello", "non-empty"),
        (["hello"], "message 0: expected"),
        ([{"role": "asistant", "content": "x"}], "message 0: unknown role 'asistant' .did you mean 'assistant'"),
        ([user("a"), {"role": "user"}], "message 1: content must be"),
        ([{"role": "user", "content": [{"type": "video", "url": "x"}]}], "unknown content part 'video'; known: text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "unknown content part"),
        ([{"role": "user", "content": [{"type": "image"}]}], "1 of 1 image parts name no image"),
        ([{"role": "user", "content": [{"type": "image", "url": "a", "path": "b"}]}], "2 sources: url, path"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "needs"),
        (
            [user("a"), {"role": "user", "content": [{"type": "image", "url": "https://example.org/a.png"}]}],
            "not fetched",
        ),
    ],
)
def test_bad_messages(chatml: TriModeProcessor, messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chatml.apply_chat_template(messages, tokenize=True)
    with pytest.raises(ValueError, match=reason):
        chatml.encode_chat(messages)


def test_the_templates_own_refusal(mistral: TriModeProcessor) -> None:
    with pytest.raises(ValueError, match="refuses these messages: no such role here"):
        mistral.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages | backwards }}", "{{ messages"])
def test_a_template_that_is_no_jinja(chatml: TriModeProcessor, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template is no valid Jinja, line 1: "):
        chatml.apply_chat_template([user("x")], chat_template=template)


def test_counts_are_in_the_errors(chatml: TriModeProcessor) -> None:
    text = "<|image_pad|><|image_pad|> x <|image_pad|>"
    with pytest.raises(ValueError, match="found 3 image placeholders but received 2 images"):
        chatml(text=text, images=[picture(3, 3)] * 2)
    with pytest.raises(ValueError, match="found 3 image placeholders but received 0 images"):
        chatml(text=text)
    with pytest.raises(ValueError, match="found 0 image parts without an image but received 1 images"):
        chatml.apply_chat_template([user("x")], tokenize=True, processor_kwargs={"images": [picture(3, 3)]})
    blind = TriModeProcessor(tokenizer=chatml_tokenizer(CHATML.replace("{{ '<|image_pad|>' }}", "")))
    with pytest.raises(ValueError, match="hold 1 images but the chat template rendered 0"):
        blind.apply_chat_template([user(picture(3, 3), "x")])
    with pytest.raises(ValueError, match="text, images or both"):
        chatml()


def test_unknown_options(chatml: TriModeProcessor) -> None:
    with pytest.raises(ValueError, match="'paddding'; did you mean 'padding'"):
        chatml(text="x", paddding=True)
    with pytest.raises(ValueError, match="'enable_thinkin'"):
        chatml.apply_chat_template([user("x")], enable_thinkin=True)
    with pytest.raises(ValueError, match="longest_edge"):
        chatml(text="<|image_pad|>", images=picture(3, 3), images_kwargs={"longest_edge": 3})


def test_image_options_of_one_call(chatml: TriModeProcessor) -> None:
    out = chatml(text="<|image_pad|>", images=picture(300, 300), images_kwargs={"size": {"longest_edge": 56}})
    assert out["image_sizes"].tolist() == [[56, 56]]
    assert int((out["input_ids"] == chatml.image_token_id).sum()) == 4


# --- saving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TriModeConfig, TriModeTextConfig])
def test_save_and_load(processor: TriModeProcessor, config: type, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config.model_type}))  # type: ignore[attr-defined]
    assert {"processor_config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in tmp_path.iterdir()
    }
    messages = [user("a <|im_end|>", picture(50, 90), "b"), says("yes")]
    for loaded in (AutoProcessor.from_pretrained(tmp_path), TriModeProcessor.from_pretrained(tmp_path)):
        assert type(loaded) is TriModeProcessor and loaded.layout == processor.layout
        assert loaded.to_dict() == processor.to_dict()
        assert loaded.chat_template == processor.chat_template
        assert loaded.encode_chat(messages)["input_ids"] == processor.encode_chat(messages)["input_ids"]
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is TriModeImageProcessor


def test_layout_and_settings_survive_saving(tmp_path: Path) -> None:
    images = TriModeImageProcessor(size={"longest_edge": 56}, resize_rule="pixtral", image_mean=[0.1, 0.2, 0.3])
    saved = TriModeProcessor(
        images, chatml_tokenizer(), image_token="<|image_pad|>", image_end_token="<|image_end|>", break_after_last=True,
        mask_token="<|mask|>", chat_template=CHATML_THINKING,
    )  # fmt: skip
    saved.encode_chat([user("x <|im_end|>"), says("y")])  # fills the caches, which are not to be saved
    saved.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    fields = json.loads((tmp_path / "processor_config.json").read_text())
    assert fields["image_start_token"] is None and fields["break_after_last"] is True
    assert loaded.to_dict() == saved.to_dict() and loaded.chat_template == CHATML_THINKING
    assert loaded.image_processor.image_mean == [0.1, 0.2, 0.3]


def test_checkpoint_without_image_processor(tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_labs_diffusion"}))
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is TriModeProcessor
    assert loaded.decode(ids_of(loaded, [user("x")])) == "<|im_start|>user\nx<|im_end|>\n"


def test_text_only_processor_refuses_images(tmp_path: Path) -> None:
    plain = TriModeProcessor(tokenizer=chatml_tokenizer(), image_token="")
    plain.save_pretrained(tmp_path)
    assert TriModeProcessor.from_pretrained(tmp_path).layout is None
    with pytest.raises(ValueError, match="hold 1 images, but this checkpoint reads text only"):
        plain.apply_chat_template([user(picture(3, 3), "x")], tokenize=True)
    with pytest.raises(ValueError, match="received 1 images, but this checkpoint reads text only"):
        plain(text="x", images=picture(3, 3))


def test_processors_can_be_sent_to_workers(chatml: TriModeProcessor) -> None:
    messages = [user("a <|im_end|>"), says("b")]
    expected = chatml.encode_chat(messages)["input_ids"]
    assert pickle.loads(pickle.dumps(chatml)).encode_chat(messages)["input_ids"] == expected
