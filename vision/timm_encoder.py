"""Any timm model as the vision tower: ViT patch tokens or a CNN's last feature map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimode_vlm.config import TimmVisionConfig


class TimmEncoder(nn.Module):
    """[n, 3, height, width] -> features [n, N, D], N = (height // stride) * (width // stride).

    The stride is `config.patch_size`: a ViT's patch, a CNN's total reduction (32 for most). Class and register tokens
    are dropped. Weights come with the checkpoint or are loaded into `.model`, whose names are timm's own.

    Raises:
        ValueError: timm has no such architecture.
    """

    def __init__(self, config: TimmVisionConfig) -> None:
        super().__init__()
        import timm

        if not timm.is_model(config.architecture):
            near = timm.list_models(f"*{config.architecture.split('_')[0]}*")[:5]
            raise ValueError(f"timm has no model {config.architecture!r}; near: {', '.join(near) or 'none'}")
        self.config = config
        is_vit = "dynamic_img_size" in _init_parameters(timm, config.architecture)
        options = {"dynamic_img_size": True, "img_size": config.image_size} if is_vit else {}
        # Towers with buffers built from numpy cannot be made on the meta device; they are small next to the text model.
        with torch.device("cpu"):
            self.model = timm.create_model(config.architecture, pretrained=False, num_classes=0, **options)
        self.num_prefix_tokens = getattr(self.model, "num_prefix_tokens", 0)

    @property
    def output_size(self) -> int:
        return self.config.hidden_size or getattr(self.model, "head_hidden_size", self.model.num_features)

    def forward(self, images: Tensor) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        features = self.model.forward_features(images.to(dtype))
        if features.dim() == 4:
            return features.flatten(2).transpose(1, 2)
        return features[:, self.num_prefix_tokens :]


def _init_parameters(timm: object, architecture: str) -> set[str]:
    import inspect

    from timm.models.vision_transformer import VisionTransformer

    entry = timm.model_entrypoint(architecture)  # type: ignore[attr-defined]
    module = inspect.getmodule(entry)
    uses_vit = module is not None and module.__name__.rsplit(".", 1)[-1] in {"vision_transformer", "deit", "eva"}
    return set(inspect.signature(VisionTransformer.__init__).parameters) if uses_vit else set()
