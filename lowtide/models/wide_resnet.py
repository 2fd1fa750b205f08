"""Wide residual network of Zagoruyko and Komodakis 2016 (arXiv 1605.07146) for CIFAR."""

from typing import Annotated

from torch import Tensor, nn

from lowtide.models.examples import labelled_images
from lowtide.models.options import Count
from lowtide.models.resnet import convolution
from lowtide.models.steps import Recipe, classify


def wrn_28_2(
    *,
    blocks: Annotated[Count, "residual blocks in each of the three groups; 4 make 28 layers"] = 4,
    classes: Annotated[Count, "labels to tell apart"] = 10,
    batch: Annotated[Count, "images of 32 x 32 in a batch"] = 100,
) -> Recipe:
    """WideResNet of 28 layers, twice as wide as the first residual nets, for 32 x 32 images."""
    layers: list[nn.Module] = [convolution(3, 16, kernel=3)]
    channels = 16
    for width, first_stride in [(32, 1), (64, 2), (128, 2)]:
        for block in range(blocks):
            layers.append(PreActivation(channels, width, first_stride if block == 0 else 1))
            channels = width
    model = nn.Sequential(
        *layers,
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
    return Recipe(classify, model, labelled_images(batch, 32, classes))


class PreActivation(nn.Module):
    """A residual block that normalises and rectifies before each convolution; without dropout."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            convolution(inputs, outputs, kernel=3, stride=stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            convolution(outputs, outputs, kernel=3),
        )
        self.projection = None if inputs == outputs else convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        activated: Tensor = self.activation(images)
        shortcut = images if self.projection is None else self.projection(activated)
        output: Tensor = self.body(activated) + shortcut
        return output
