"""Any timm model as the vision tower: ViT patch tokens or a CNN's last feature map."""

from __future__ import annotations

import warnings
from typing import Any

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
        from timm.models import is_model_in_modules

        if not timm.is_model(config.architecture):
            near = timm.list_models(f"*{config.architecture.split('_')[0]}*")[:5]
            raise ValueError(f"timm has no model {config.architecture!r}; near: {', '.join(near) or 'none'}")
        self.config = config
        # A ViT is told to take any grid; a CNN takes one anyway and does not know the options.
        is_vit = is_model_in_modules(config.architecture, ["vision_transformer"])
        options: dict[str, Any] = {"dynamic_img_size": True, "img_size": config.image_size} if is_vit else {}
        # Towers with buffers built from numpy cannot be made on the meta device; they are small next to the text model.
        with torch.device("cpu"):
            self.model: Any = timm.create_model(config.architecture, pretrained=False, num_classes=0, **options)
        self.num_prefix_tokens = getattr(self.model, "num_prefix_tokens", 0)
        self._checkpoints = False

    @property
    def gradient_checkpointing(self) -> bool:
        """What transformers switches, as in every tower; timm does it by its own method."""
        return self._checkpoints

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        try:
            self.model.set_grad_checkpointing(enable)
        except AssertionError:
            warnings.warn(f"timm tower {self.config.architecture!r} has no gradient checkpointing", stacklevel=2)
            return
        self._checkpoints = enable

    @property
    def output_size(self) -> int:
        return self.config.hidden_size or self.model.num_features

    def forward(self, images: Tensor) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        features = self.model.forward_features(images.to(dtype))
        tokens = features.flatten(2).transpose(1, 2) if features.dim() == 4 else features[:, self.num_prefix_tokens :]
        stride, (height, width) = self.config.patch_size, images.shape[-2:]
        expected = (height // stride) * (width // stride)
        if tokens.shape[1] != expected:
            raise ValueError(
                f"timm tower {self.config.architecture!r} gives {tokens.shape[1]} features for {height} x {width} "
                f"pixels but patch_size {stride} means {expected}: set patch_size to its stride"
            )
        return tokens
