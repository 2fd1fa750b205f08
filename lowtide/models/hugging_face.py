"""Models of the transformers library with random weights; it is imported only when one of them is built."""

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import torch

from lowtide.models.examples import gapped_tokens, next_tokens
from lowtide.models.options import Count, Probability
from lowtide.models.steps import Recipe, minimize_own_loss
from lowtide.models.transformer import choose_heads


def installed() -> bool:
    """Say whether the transformers library can be imported, without importing it."""
    return find_spec("transformers") is not None


def hf_gpt2(
    *,
    layers: Annotated[Count, "transformer blocks"] = 12,
    width: Annotated[Count, "numbers that stand for one token"] = 768,
    heads: Annotated[Count | None, "attention heads; left out, one for each 64 of width"] = None,
    context: Annotated[Count, "tokens in a sequence"] = 128,
    vocabulary: Annotated[Count, "different tokens"] = 50257,
    dropout: Annotated[Probability, "share of activations and of attention that is dropped"] = 0.1,
    batch: Annotated[Count, "sequences in a batch"] = 4,
) -> Recipe:
    """Hugging Face GPT-2 language model."""
    transformers = import_module("transformers")
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=choose_heads(width, heads),
        n_positions=context,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
    )
    tokens, _ = next_tokens(batch, context, vocabulary)
    fields = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which it falls back on anyway, but with a warning
    return Recipe(minimize_own_loss, model, (fields,))


def hf_bert(
    *,
    layers: Annotated[Count, "transformer blocks"] = 12,
    width: Annotated[Count, "numbers that stand for one token"] = 768,
    heads: Annotated[Count | None, "attention heads; left out, one for each 64 of width"] = None,
    context: Annotated[Count, "tokens in a sequence"] = 128,
    vocabulary: Annotated[Count, "different tokens"] = 30522,
    dropout: Annotated[Probability, "share of activations and of attention that is dropped"] = 0.1,
    batch: Annotated[Count, "sequences in a batch"] = 4,
) -> Recipe:
    """Hugging Face BERT masked-language model."""
    transformers = import_module("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=choose_heads(width, heads),
        intermediate_size=4 * width,
        max_position_embeddings=context,
        vocab_size=vocabulary,
        pad_token_id=None,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    tokens, mask, labels = gapped_tokens(batch, context, vocabulary)
    fields = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return Recipe(minimize_own_loss, transformers.BertForMaskedLM(config), (fields,))
