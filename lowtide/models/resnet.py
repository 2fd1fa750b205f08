"""Residual networks of He et al. 2015 (arXiv 1512.03385) for ImageNet.

As in torchvision, the 3 x 3 convolution of a bottleneck carries the stride; ReLU and the residual sum are
in place.
"""

from typing import Annotated, Literal

from torch import Tensor, nn

from lowtide.models.examples import check_image_size, labelled_images
from lowtide.models.options import Count, Stages
from lowtide.models.steps import Recipe, classify

STAGES = {  # depth -> blocks in each stage; they are bottlenecks from depth 50 on
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}


def resnet(
    *,
    depth: Annotated[Literal[18, 34, 50, 101, 152, 200], "layers, as the paper counts them"] = 50,
    stages: Annotated[Stages | None, "bottlenecks in each of the four stages, in place of depth"] = None,
    width: Annotated[Count, "channels of the first stage, doubled in each that follows"] = 64,
    batch: Annotated[Count, "images in a batch"] = 16,
    size: Annotated[Count, "height and width of an image"] = 128,
    classes: Annotated[Count, "labels to tell apart"] = 1000,
) -> Recipe:
    """ResNet image classifier of any depth, with BatchNorm and in-place ReLU."""
    check_image_size(batch, size, shrink=32)
    bottleneck = stages is not None or depth >= 50
    model = residual_network(stages or STAGES[depth], width, classes, bottleneck=bottleneck)
    return Recipe(classify, model, labelled_images(batch, size, classes))


def residual_network(stages: tuple[int, ...], width: int, classes: int, *, bottleneck: bool) -> nn.Module:
    """Join the stem, four stages of residual blocks and the classifier."""
    layers: list[nn.Module] = [
        convolution(3, width, kernel=7, stride=2),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    make_body = bottleneck_body if bottleneck else basic_body
    channels = width
    for stage, blocks in enumerate(stages):
        inner = width * 2**stage
        outputs = 4 * inner if bottleneck else inner
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(make_body(channels, inner, stride), shortcut(channels, outputs, stride)))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """The sum of a body and a shortcut, rectified."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.body(images)
        total += self.shortcut(images)
        return total.relu_()


def basic_body(inputs: int, width: int, stride: int) -> nn.Module:
    """Make two 3 x 3 convolutions."""
    return nn.Sequential(
        convolution(inputs, width, kernel=3, stride=stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        convolution(width, width, kernel=3),
        nn.BatchNorm2d(width),
    )


def bottleneck_body(inputs: int, width: int, stride: int) -> nn.Module:
    """Make a 3 x 3 convolution between two 1 x 1 ones, of which the second widens four times."""
    return nn.Sequential(
        convolution(inputs, width, kernel=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        convolution(width, width, kernel=3, stride=stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        convolution(width, 4 * width, kernel=1),
        nn.BatchNorm2d(4 * width),
    )


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Pass the images on as they are, or projected where the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, kernel=1, stride=stride), nn.BatchNorm2d(outputs))


def convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps the image's size but for its stride, initialised for ReLU."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
