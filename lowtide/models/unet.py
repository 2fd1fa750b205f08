"""U-Net of Ronneberger et al. 2015 (arXiv 1505.04597), with BatchNorm and padded convolutions."""

from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from lowtide.errors import UsageError
from lowtide.models.examples import check_image_size, generator
from lowtide.models.options import Count
from lowtide.models.resnet import convolution
from lowtide.models.steps import Recipe, classify


def unet(
    *,
    width: Annotated[Count, "channels at full resolution, doubled at each level below"] = 32,
    depth: Annotated[Count, "levels below the full resolution"] = 4,
    batch: Annotated[Count, "images in a batch"] = 4,
    size: Annotated[Count, "height and width of an image, a multiple of 2 ** depth"] = 192,
    classes: Annotated[Count, "labels to tell apart at each pixel"] = 2,
) -> Recipe:
    """U-Net image segmenter, whose way up reads what its way down has kept."""
    shrink = 2**depth
    check_image_size(batch, size, shrink)
    if size % shrink:
        nearest = size - size % shrink
        raise UsageError(
            f"size={size} can't be halved {depth} times: it is no multiple of {shrink}",
            hint=f"use size={nearest} or size={nearest + shrink}",
        )
    source = generator()
    images = torch.randn(batch, 3, size, size, generator=source)
    labels = torch.randint(classes, (batch, size, size), generator=source)
    return Recipe(classify, UNet(width, depth, classes), (images, labels))


class UNet(nn.Module):
    """A way down, a way up, and a skip across at each level."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        steps_up = list(pairwise(reversed(widths)))
        self.shrink = nn.MaxPool2d(2)
        self.down = nn.ModuleList(two_convolutions(above, below) for above, below in pairwise([3, *widths]))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(*channels, 2, stride=2) for channels in steps_up)
        self.up = nn.ModuleList(two_convolutions(2 * above, above) for _, above in steps_up)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        features: Tensor = self.down[0](images)
        for block in self.down[1:]:
            skips.append(features)
            features = block(self.shrink(features))
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            features = block(torch.cat([skips.pop(), enlarge(features)], dim=1))
        logits: Tensor = self.head(features)
        return logits


def two_convolutions(inputs: int, outputs: int) -> nn.Module:
    """Make two 3 x 3 convolutions, each followed by BatchNorm and ReLU."""
    return nn.Sequential(
        convolution(inputs, outputs, kernel=3),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        convolution(outputs, outputs, kernel=3),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
