"""Images in, text out, decoded three ways: autoregressive, block diffusion, self-speculation.

Shape legend, used as name suffixes throughout (``q_BHTK``): B batch, T query length, S key length, D width, H heads,
G kv heads, K head width, V vocabulary, N image patches.
An attention mask is True in row i, column j where token i attends to token j.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimode_vlm.checkpoints import load
    from trimode_vlm.config import TriModeConfig
    from trimode_vlm.generate import TriModeGenerateOutput
    from trimode_vlm.generation_config import TriModeGenerationConfig
    from trimode_vlm.model import TriModeVLM
    from trimode_vlm.processor import TriModeProcessor

__version__ = "0.1.0"
__all__ = [
    "TriModeConfig",
    "TriModeGenerateOutput",
    "TriModeGenerationConfig",
    "TriModeProcessor",
    "TriModeVLM",
    "load",
    "register_auto_classes",
]

_HOME = {
    "TriModeConfig": "config",
    "TriModeGenerateOutput": "generate",
    "TriModeGenerationConfig": "generation_config",
    "TriModeProcessor": "processor",
    "TriModeVLM": "model",
    "load": "checkpoints",
}

# transformers imports torchao where it is installed, and torch then announces a change that no user can act on.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant()" not in str(record.msg))

_PACKAGE = Path(__file__).resolve().parent
if not (_PACKAGE / "vision").is_dir():
    # A checkout: vision/, training/, eval/ and demo/ lie beside this folder and import as trimode_vlm.vision and so on.
    __path__.append(str(_PACKAGE.parent))


def register_auto_classes() -> None:
    """Make transformers' AutoConfig, AutoModel..., AutoProcessor and pipelines know our classes; twice is harmless."""
    for name in ("config", "model", "processor"):
        importlib.import_module(f"{__name__}.{name}")


def _is_own_command() -> bool:
    """Whether this process is the `trimode-vlm` command, which checks its arguments before it pays for torch.

    Nothing runs before this file, so the process itself has to tell: registering with transformers at import is what
    makes its Auto classes know a folder of ours, and importing torch is what makes a mistyped option wait for seconds.
    """
    # While Python looks for the module of -m, argv is ["-m", its arguments] and orig_argv ends with [module, these].
    is_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__
    return is_module or Path(*sys.argv[:1]).stem == "trimode-vlm"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _is_own_command():
    register_auto_classes()
