"""Models of timm, torchvision and diffusers with random weights, and the list of all models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.bench.models.families import BATCH, CLASSES, HUGGING_FACE, SIDE, TOKENS, Batch, Build, Family


def _classified(model: nn.Module) -> tuple[nn.Module, Batch]:
    """A model of pictures that takes them alone, with its loss."""
    return Classifier(model), {
        "pictures": torch.randn(BATCH, 3, 2 * SIDE, 2 * SIDE),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


class Classifier(nn.Module):
    """A model of pictures and the loss of its labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.model(pictures), labels)


def _timm(name: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        timm = import_module("timm")
        return _classified(timm.create_model(name, pretrained=False, num_classes=CLASSES, **options))

    return build


def _torchvision(name: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        models = import_module("torchvision.models")
        return _classified(models.get_model(name, weights=None, num_classes=CLASSES, **options))

    return build


class Denoiser(nn.Module):
    """A UNet of diffusion and the loss of the noise that it finds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor, **others: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.model(noisy, times, **others).sample, noise)


def _diffusion(kind: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        diffusers = import_module("diffusers")
        words = {"encoder_hidden_states": torch.randn(BATCH, TOKENS, 16)} if "Condition" in kind else {}
        small = {"sample_size": SIDE, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 4}
        pictures, noise = torch.randn(2, BATCH, 3, SIDE, SIDE)
        return Denoiser(getattr(diffusers, kind)(**small, **options)), {
            "noisy": pictures,
            "times": torch.randint(0, 1000, (BATCH,)),
            "noise": noise,
            **words,
        }

    return build


TIMM: Mapping[str, Build] = {
    "timm-resnet18": _timm("resnet18"),
    "timm-mobilenetv3": _timm("mobilenetv3_small_050"),
    "timm-efficientnet": _timm("efficientnet_b0"),
    "timm-regnet": _timm("regnety_002"),
    "timm-densenet": _timm("densenet121"),
    "timm-convnextv2": _timm("convnextv2_atto"),
    "timm-vgg": _timm("vgg11_bn"),
}
TORCHVISION: Mapping[str, Build] = {
    "torchvision-resnet18": _torchvision("resnet18"),
    "torchvision-mobilenet": _torchvision("mobilenet_v3_small"),
    "torchvision-shufflenet": _torchvision("shufflenet_v2_x0_5"),
    "torchvision-squeezenet": _torchvision("squeezenet1_1"),
}
DIFFUSERS: Mapping[str, Build] = {
    "diffusion-unet": _diffusion(
        "UNet2DModel",
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    "diffusion-unet-words": _diffusion(
        "UNet2DConditionModel",
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        cross_attention_dim=16,
    ),
}

FAMILIES: Mapping[str, Family] = {
    name: Family(name, library, build, needs)
    for library, found, needs in (
        ("transformers", HUGGING_FACE, ()),
        ("timm", TIMM, ("torchvision",)),
        ("torchvision", TORCHVISION, ()),
        ("diffusers", DIFFUSERS, ()),
    )
    for name, build in found.items()
}
