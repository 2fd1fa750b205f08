"""Language models on torch's own recurrent layers, which run a whole sequence in one call."""

from typing import Annotated

from torch import Tensor, nn

from lowtide.models.examples import next_tokens
from lowtide.models.options import Count
from lowtide.models.steps import Recipe, classify_each


def lstm(
    *,
    layers: Annotated[Count, "recurrent layers"] = 2,
    width: Annotated[Count, "units in each layer"] = 512,
    length: Annotated[Count, "tokens in a sequence"] = 64,
    vocabulary: Annotated[Count, "different tokens"] = 8192,
    batch: Annotated[Count, "sequences in a batch"] = 16,
) -> Recipe:
    """Language model on nn.LSTM."""
    model = LanguageModel(nn.LSTM(width, width, layers, batch_first=True), width, vocabulary)
    return Recipe(classify_each, model, next_tokens(batch, length, vocabulary))


def gru(
    *,
    layers: Annotated[Count, "recurrent layers"] = 2,
    width: Annotated[Count, "units in each layer"] = 512,
    length: Annotated[Count, "tokens in a sequence"] = 64,
    vocabulary: Annotated[Count, "different tokens"] = 8192,
    batch: Annotated[Count, "sequences in a batch"] = 16,
) -> Recipe:
    """Language model on nn.GRU."""
    model = LanguageModel(nn.GRU(width, width, layers, batch_first=True), width, vocabulary)
    return Recipe(classify_each, model, next_tokens(batch, length, vocabulary))


class LanguageModel(nn.Module):
    """Embedding, recurrent layers and a head."""

    def __init__(self, layers: nn.LSTM | nn.GRU, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = layers
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.tokens(tokens))
        logits: Tensor = self.head(hidden)
        return logits
