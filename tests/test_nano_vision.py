"""Stage 0 of the nano recipe: its loop, its check on held-out pictures, its place on a rank's device."""

import torch
from test_trainer import StopAt, log_of

from trimode_vlm.training.nano_data import cell_word_ids
from trimode_vlm.training.nano_recipe import NanoSettings, start_model
from trimode_vlm.training.nano_vision import HELD_OUT_CELLS, PictureSource, VisionTrainer, held_out_pictures
from trimode_vlm.training.settings import read_yaml
from trimode_vlm.training.synthetic import HELD_OUT_SEED
from trimode_vlm.training.train_settings import TrainSettings

SLOTS = ("color", "content", "row", "col")
SMALL = read_yaml("nano-smoke")["model"]


def vision_trainer(folder, overrides=SMALL, **changes):
    model, processor, places = start_model(NanoSettings(model=overrides))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("encoder.vision_tower.", "encoder.multi_modal_projector.")))
    settings = TrainSettings(**{"steps": 2, "lr": 3e-3, "batch_tokens": 100, "log_every": 1, **changes})
    return VisionTrainer(model, processor, cell_word_ids(processor), places, settings, folder)


def test_the_stage_resumes_and_ends_with_accuracies_on_held_out_pictures(tmp_path):
    straight = vision_trainer(tmp_path / "a").fit()
    half = vision_trainer(tmp_path / "b")
    half.add_callback(StopAt(1))
    half.fit()
    metrics = vision_trainer(tmp_path / "b").fit()
    assert metrics == straight
    assert metrics["held_out_cells"] >= HELD_OUT_CELLS > 0 and 0 < metrics["held_out_filled_cells"] < HELD_OUT_CELLS
    for name in (*(f"held_out_{slot}_accuracy" for slot in SLOTS), "held_out_filled_accuracy"):
        assert 0 <= metrics[name] <= 1
    log = log_of(tmp_path / "b")
    assert [entry["step"] for entry in log] == [1, 2] and "content_loss" in log[-1]


def test_held_out_pictures_are_of_every_kind_and_never_trained_on():
    pictures = held_out_pictures(HELD_OUT_CELLS)
    assert {p.kind for p in pictures} == {"grid", "receipt", "chart"}
    assert all(p.seed >= HELD_OUT_SEED for p in pictures)
    assert all(p.seed < HELD_OUT_SEED for step in range(3) for p in PictureSource(0, 100).draw(step, 0, 1))


def test_the_check_counts_right_cells(tmp_path, monkeypatch):
    """Features that are the targets are right everywhere; features without content miss every cell that has some."""
    trainer = vision_trainer(tmp_path, {})
    targets = trainer.prepare(held_out_pictures(HELD_OUT_CELLS)).targets
    monkeypatch.setattr(trainer.model, "forward", lambda *images: targets)
    perfect = trainer.held_out()
    assert {perfect[f"held_out_{slot}_accuracy"] for slot in (*SLOTS, "filled")} == {1.0}
    monkeypatch.setattr(trainer.model, "forward", lambda *images: torch.zeros_like(targets))
    blind = trainer.held_out()
    empty_share = 1 - blind["held_out_filled_cells"] / blind["held_out_cells"]
    assert blind["held_out_filled_accuracy"] == 0 and empty_share <= blind["held_out_content_accuracy"] < 1


def test_features_do_not_depend_on_the_company(tmp_path):
    trainer = vision_trainer(tmp_path)
    pictures = held_out_pictures(HELD_OUT_CELLS)

    def features(chosen):
        batch = trainer.prepare(chosen)
        return trainer.model(batch.pixel_values, batch.image_sizes)

    with torch.no_grad():
        together = features(pictures)
        alone = torch.cat([features([picture]) for picture in pictures])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
