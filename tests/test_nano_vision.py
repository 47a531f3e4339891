"""Stage 0 of the nano recipe: its loop, its check on held-out pictures, its place on a rank's device."""

import json

import fake_device
import torch
from fake_device import FakeDevice

from trimode_vlm.training.distributed import Ranks
from trimode_vlm.training.nano_data import cell_word_ids
from trimode_vlm.training.nano_recipe import NanoSettings, start_model
from trimode_vlm.training.nano_vision import HELD_OUT_CELLS, PictureSource, VisionTrainer, held_out_pictures
from trimode_vlm.training.settings import read_yaml
from trimode_vlm.training.synthetic import HELD_OUT_SEED
from trimode_vlm.training.train_settings import TrainSettings

SLOTS = ("color", "content", "row", "col")
SMALL = read_yaml("nano-smoke")["model"]


def vision_trainer(folder, overrides=SMALL, ranks=None, **changes):
    model, processor, places = start_model(NanoSettings(model=overrides))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("encoder.vision_tower.", "encoder.multi_modal_projector.")))
    settings = TrainSettings(**{"steps": 2, "lr": 3e-3, "batch_tokens": 100, "log_every": 1, **changes})
    return VisionTrainer(model, processor, cell_word_ids(processor), places, settings, folder, ranks or Ranks())


def parameters(trainer):
    return torch.cat([p.detach().flatten() for _, p in trainer.named])


def test_the_stage_ends_with_accuracies_on_held_out_pictures(tmp_path):
    trainer = vision_trainer(tmp_path)
    assert not any(name.startswith("held_out") for name in trainer.fit(until=1)), "in the middle of the stage"
    metrics = trainer.fit()
    assert metrics["held_out_cells"] >= HELD_OUT_CELLS > 0 and 0 < metrics["held_out_filled_cells"] < HELD_OUT_CELLS
    for name in (*(f"held_out_{slot}_accuracy" for slot in SLOTS), "held_out_filled_accuracy"):
        assert 0 <= metrics[name] <= 1
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and {k: v for k, v in metrics.items() if k.startswith("held_out")}.items() <= last.items()
    assert metrics["step"] == 2 and "content_loss" in metrics


def test_held_out_pictures_are_of_every_kind_and_never_trained_on():
    pictures = held_out_pictures(HELD_OUT_CELLS)
    assert {p.kind for p in pictures} == {"grid", "receipt", "chart"}
    assert all(p.seed >= HELD_OUT_SEED for p in pictures)
    assert all(p.seed < HELD_OUT_SEED for step in range(3) for p in PictureSource(0, 100).draw(step, 0, 1))


def test_the_check_counts_right_cells(tmp_path, monkeypatch):
    """Features that are the targets are right everywhere; features without content miss every cell that has some."""
    trainer = vision_trainer(tmp_path, {})
    _, vectors = trainer.targets(held_out_pictures(HELD_OUT_CELLS))
    monkeypatch.setattr(trainer, "features", lambda *images: vectors)
    perfect = trainer.held_out()
    assert {perfect[f"held_out_{slot}_accuracy"] for slot in (*SLOTS, "filled")} == {1.0}
    monkeypatch.setattr(trainer, "features", lambda *images: torch.zeros_like(vectors))
    blind = trainer.held_out()
    empty_share = 1 - blind["held_out_filled_cells"] / blind["held_out_cells"]
    assert blind["held_out_filled_accuracy"] == 0 and empty_share <= blind["held_out_content_accuracy"] < 1


def test_features_do_not_depend_on_the_company(tmp_path):
    trainer = vision_trainer(tmp_path)
    pictures = held_out_pictures(HELD_OUT_CELLS)
    with torch.no_grad():
        together = trainer.features(*trainer.images(pictures))
        alone = torch.cat([trainer.features(*trainer.images([picture])) for picture in pictures])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_the_stage_lies_on_the_ranks_device_and_equals_one_on_the_cpu(tmp_path):
    here = vision_trainer(tmp_path / "cpu")
    expected = here.fit()
    with FakeDevice() as fake:
        there = vision_trainer(tmp_path / "fake", ranks=Ranks(device=fake_device.DEVICE))
        metrics = there.fit()
    assert metrics == expected and torch.equal(parameters(here), parameters(there))
    assert all(fake.holds(p) for p in there.model.parameters())
