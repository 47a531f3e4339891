"""Tiny random models and a processor that every test file may use; all on the CPU, offline, in milliseconds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# The suite runs several workers on few cores: more threads than one each make small tensors slower, not faster.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would what the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "trimode_vlm" / "examples"

TINY_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "block_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mask_token_id": 3,
    "image_token_id": 4,
    "image_start_token_id": 5,
    "image_break_token_id": 6,
    "image_end_token_id": 7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
TINY_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 448,
    "hidden_act": "silu",
}


def tiny_config(vision: bool = True, **overrides: Any) -> Any:
    """A two-layer config; `vision=False` gives the text-only class, `overrides` replace single fields."""
    from trimode_vlm.config import TriModeConfig, TriModeTextConfig

    fields = {**TINY_TEXT, "vision_config": dict(TINY_VISION) if vision else None, **overrides}
    return (TriModeConfig if fields["vision_config"] else TriModeTextConfig)(**fields)


def make_tiny_model(seed: int = 0, scale: float = 0.3, **overrides: Any) -> Any:
    """A random model whose greedy answers vary: weights of normal size would repeat one token."""
    from trimode_vlm import TriModeVLM

    torch.manual_seed(seed)
    model = TriModeVLM(tiny_config(**overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
    return model


@pytest.fixture(scope="session", autouse=True)
def no_users_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure of mode auto is kept away from the user's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMODE_VLM_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True)
def the_same_chance_in_any_order() -> None:
    """Numbers that a test draws without a generator do not hang on which tests its worker ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def pillow_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """lmms-eval, which some tests import, tells Pillow to take truncated files; no other test may see that."""
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """Two layers, a Pixtral tower and the vocabulary of `TINY_TEXT`; shared, so leave its weights alone."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_text_model() -> Any:
    """The text-only counterpart of `tiny_model`."""
    return make_tiny_model(vision=False)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """nano's tokenizer: byte-level, so that any text goes in and comes out."""
    from trimode_vlm.training.nano_tokenizer import build_tokenizer

    return build_tokenizer()


@pytest.fixture(scope="session")
def processor(tokenizer: Any) -> Any:
    """A processor with nano's tokenizer and image layout; one image token covers 28 x 28 pixels."""
    from trimode_vlm import TriModeProcessor

    return TriModeProcessor(tokenizer=tokenizer)


@pytest.fixture(scope="session")
def chat_model(tokenizer: Any) -> Any:
    """A tiny random model that knows the tokenizer's ids: it answers `processor`'s inputs, though never sensibly."""
    ids = tokenizer.convert_tokens_to_ids
    return make_tiny_model(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
        image_token_id=ids("<|image_pad|>"),
        image_start_token_id=ids("<|image_start|>"),
        image_break_token_id=ids("<|image_break|>"),
        image_end_token_id=ids("<|image_end|>"),
    )


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama saved by transformers; shared, so change a `llama_copy` instead."""
    from foreign_models import TEXT, randomise, saved
    from transformers import LlamaConfig, LlamaForCausalLM

    return saved(randomise(LlamaForCausalLM(LlamaConfig(**TEXT))), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mistral3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Ministral-3 with its tower, saved by transformers."""
    from foreign_models import mistral3, saved

    return saved(mistral3(), tmp_path_factory.mktemp("mistral3"))


@pytest.fixture
def llama_copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "llama"))
