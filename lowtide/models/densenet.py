"""Densely connected network of Huang et al. 2016 (arXiv 1608.06993): DenseNet-BC with 121 layers."""

from typing import Annotated

import torch
from torch import Tensor, nn

from lowtide.models.examples import check_image_size, labelled_images
from lowtide.models.options import Count, Stages
from lowtide.models.resnet import convolution
from lowtide.models.steps import Recipe, classify


def densenet121(
    *,
    stages: Annotated[Stages, "layers in each of the four blocks"] = (6, 12, 24, 16),
    growth: Annotated[Count, "channels that each layer adds"] = 32,
    batch: Annotated[Count, "images in a batch"] = 16,
    size: Annotated[Count, "height and width of an image"] = 128,
    classes: Annotated[Count, "labels to tell apart"] = 1000,
) -> Recipe:
    """DenseNet-121 image classifier, in which each layer reads the outputs of all before it."""
    check_image_size(batch, size, shrink=32)
    channels = 2 * growth
    layers: list[nn.Module] = [
        convolution(3, channels, kernel=7, stride=2),
        *normalise(channels),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for index, count in enumerate(stages):
        if index > 0:
            layers += transition(channels)
            channels //= 2
        layers.append(DenseBlock(channels, growth, count))
        channels += count * growth
    layers += [*normalise(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return Recipe(classify, nn.Sequential(*layers), labelled_images(batch, size, classes))


class DenseBlock(nn.Module):
    """Layers that each add their output to the list of what the later ones read."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense_layer(channels + index * growth, growth) for index in range(count))

    def forward(self, images: Tensor) -> Tensor:
        features = [images]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


def dense_layer(channels: int, growth: int) -> nn.Module:
    """Make a 1 x 1 convolution down to four times the growth, then a 3 x 3 one down to the growth."""
    return nn.Sequential(
        *normalise(channels),
        convolution(channels, 4 * growth, kernel=1),
        *normalise(4 * growth),
        convolution(4 * growth, growth, kernel=3),
    )


def transition(channels: int) -> list[nn.Module]:
    """Halve the channels, the height and the width."""
    return [*normalise(channels), convolution(channels, channels // 2, kernel=1), nn.AvgPool2d(2)]


def normalise(channels: int) -> list[nn.Module]:
    """Make BatchNorm and ReLU."""
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
