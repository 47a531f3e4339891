"""Tiny models and hand-made samples that the training tests share."""

import torch

from trimode_vlm.config import preset
from trimode_vlm.model import TriModeVLM
from trimode_vlm.training.collate import NoiseSettings
from trimode_vlm.training.data import Encoded

IMAGE, BREAK, END, MASK, EOS = 3, 4, 5, 6, 7
VISION_IDS = (IMAGE, BREAK, END)


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = preset(
        "nano", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, mask_token_id=MASK, image_token_id=IMAGE, image_start_token_id=None,
        image_break_token_id=BREAK, image_end_token_id=END, eos_token_id=EOS, bos_token_id=None, pad_token_id=0,
        vision_config=dict(
            model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            patch_size=4, image_size=64,
        ),
    )  # fmt: skip
    model = TriModeVLM(config)
    for p in model.parameters():  # larger than the usual start, so that errors show
        torch.nn.init.normal_(p, std=0.2) if p.ndim > 1 else torch.nn.init.normal_(p, 1.0, 0.1)
    return model


def sample(number, turns=((5, 9),), images=()):
    """A chat of (prompt, response) lengths; images are (rows, columns) of merged tokens in the first prompt."""
    generator = torch.Generator().manual_seed(100 + number)
    ids, loss_mask, pixel_list = [], [], []
    for rows, cols in images:
        for row in range(rows):
            ids += [IMAGE] * cols + [END if row == rows - 1 else BREAK]
        pixel_list.append(torch.randn(3, rows * 8, cols * 8, generator=generator))
    loss_mask += [False] * len(ids)
    for prompt, response in turns:
        ids += torch.randint(8, 64, (prompt + response - 1,), generator=generator).tolist() + [EOS]
        loss_mask += [False] * prompt + [True] * response
    return Encoded(sample_id=number, input_ids=ids, loss_mask=loss_mask, images=pixel_list)


def noise_settings(**changes):
    return NoiseSettings(**{"mask_token_id": MASK, "vision_token_ids": VISION_IDS, "block_length": 4, **changes})


MIXED = [
    sample(0, ((5, 9),)),
    sample(1, ((3, 7), (4, 6)), images=((2, 3),)),
    sample(2, ((2, 1),)),
    sample(3, ((6, 12),), images=((1, 1), (2, 2))),
]
