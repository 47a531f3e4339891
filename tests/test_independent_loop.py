"""Five steps of the trainer against a loop in plain PyTorch: rates of each part, decay, clipping, schedule, betas."""

import math

import torch
from test_trainer import SAMPLES, trainer, weights
from training_cases import noise_settings, tiny_model

from trimode_vlm.training.collate import micro_batches
from trimode_vlm.training.data import ListSource
from trimode_vlm.training.objective import combine, tri_mode_terms

RATES = {"vision_tower": 3e-3, "multi_modal_projector": 5e-3}
# A clip at which AdamW's epsilon counts, so that the size of the clipped gradient shows.
OPTIONS = dict(lr=1e-2, lr_vision=3e-3, lr_projector=5e-3, weight_decay=0.3, betas=[0.8, 0.9], grad_clip=1e-7)


def test_five_steps_are_those_of_a_plain_loop(tmp_path):
    t = trainer(tmp_path, dtype=torch.float64, steps=5, warmup=0.4, **OPTIONS)
    t.fit()

    model, source = tiny_model().double(), ListSource(SAMPLES, batch_samples=4)
    groups = []
    for name, parameter in model.named_parameters():
        rate = next((rate for part, rate in RATES.items() if part in name), 1e-2)
        groups.append({"params": [parameter], "lr": rate, "rate": rate, "weight_decay": 0.3 * (parameter.ndim > 1)})
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    for step in range(5):
        share = step / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 3))
        for group in optimizer.param_groups:
            group["lr"] = share * group["rate"]
        (batch,) = micro_batches(source.draw(step, 0, 1), noise_settings())
        terms = model(
            input_ids=batch.input_ids,
            position_ids=batch.position,
            pixel_values=batch.pixel_values,
            image_sizes=batch.image_sizes,
            pattern=batch.pattern(),
            tower_calls=1,
            objective=lambda hidden, head, b=batch: tri_mode_terms(
                hidden, b.target, b.is_noisy, b.p_mask, b.sequence, head
            ),
        )
        optimizer.zero_grad()
        combine(terms.ar_sum, terms.diff_sum, batch.counts, alpha=0.3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-7)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(t), expected, atol=1e-7, rtol=0)
    assert not torch.allclose(expected, weights(trainer(tmp_path / "new", dtype=torch.float64)), atol=1e-3)
