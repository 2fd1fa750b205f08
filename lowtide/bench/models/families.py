"""Models of transformers in small configurations with random weights.

Nothing is downloaded. Widths are small, everything else is as the library has it, but for draws that decide which
layers run (`layerdrop`) and for masks of wav2vec2 and its like, which numpy draws: both are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, WORDS, SIDE, CLASSES = 2, 16, 96, 32, 5
SAMPLES = 1600  # of sound
FRAMES = 64  # of a spectrogram

Batch = dict[str, Any]
Build = Callable[[], tuple[nn.Module, Batch]]

# Whichever of these a configuration knows; the others it does not have.
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
FEW_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    **FEW_HEADS,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
IMAGES = {"image_size": SIDE, "patch_size": 8, "num_channels": 3, "num_labels": CLASSES}
SOUND = {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_labels": CLASSES,
}


@dataclass(frozen=True)
class Family:
    """One model, and how it is made."""

    name: str
    library: str
    build: Build  # a model and the arguments of its forward
    needs: tuple[str, ...] = ()  # other libraries

    @property
    def installed(self) -> bool:
        """Whether its libraries can be imported, without importing them."""
        return all(find_spec(name) is not None for name in (self.library, *self.needs))


def minimize(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> Tensor:
    """Train on the loss that the model makes, or on the squares of its first output where it makes none."""
    loss = _loss(model(**batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = output if isinstance(output, Tensor) else output[0]
    assert isinstance(first, Tensor)
    return first.square().mean()


def _model(kind: str, head: str, options: Mapping[str, Any]) -> nn.Module:
    """A model of transformers by the name of its family."""
    transformers = import_module("transformers")
    plain = transformers.AutoConfig.for_model(kind)
    named = type(plain).attribute_map  # the names that the family has for what all have
    known = {key: value for key, value in SMALL.items() if hasattr(plain, key) and named.get(key) not in options}
    config = transformers.AutoConfig.for_model(kind, **{**known, **options})
    model: nn.Module = getattr(transformers, head)(config)
    return model


def _words(*, gaps: bool = False) -> Batch:
    """Tokens of which the second sentence is shorter, padded; with gaps, some of them are asked for, else all."""
    tokens = torch.randint(3, WORDS, (BATCH, TOKENS))
    mask = torch.ones_like(tokens)
    mask[1, -TOKENS // 4 :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if gaps:
        labels = labels.masked_fill(torch.rand(labels.shape) < 0.5, -100)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def _causal(kind: str, head: str, **options: Any) -> Build:
    return lambda: (_model(kind, head, options), _words())


def _gapped(kind: str, head: str, **options: Any) -> Build:
    return lambda: (_model(kind, head, options), _words(gaps=True))


def _translated(kind: str, head: str, **options: Any) -> Build:
    return lambda: (_model(kind, head, options), _words())


def _pictures(kind: str, head: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        pixels = torch.randn(BATCH, 3, SIDE, SIDE)
        return _model(kind, head, {**IMAGES, **options}), {
            "pixel_values": pixels,
            "labels": torch.randint(0, CLASSES, (BATCH,)),
        }

    return build


def _outlines(kind: str, head: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        labels = torch.randint(0, CLASSES, (BATCH, SIDE, SIDE))
        return _model(kind, head, {**IMAGES, **options}), {
            "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE),
            "labels": labels,
        }

    return build


def _sound(kind: str, head: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Batch]:
        labels = torch.randint(0, CLASSES, (BATCH,))
        return _model(kind, head, {**SOUND, **options}), {
            "input_values": torch.randn(BATCH, SAMPLES),
            "labels": labels,
        }

    return build


def _spectrum() -> tuple[nn.Module, Batch]:
    options = {"max_length": FRAMES, "num_mel_bins": 32, "patch_size": 8, "num_labels": CLASSES}
    model = _model("audio-spectrogram-transformer", "ASTForAudioClassification", options)
    return model, {
        "input_values": torch.randn(BATCH, FRAMES, 32),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def _whisper() -> tuple[nn.Module, Batch]:
    options = {**TWO_STACKS, "num_mel_bins": 16, "max_source_positions": FRAMES // 2, "max_target_positions": TOKENS}
    model = _model("whisper", "WhisperForConditionalGeneration", options)
    return model, {
        "input_features": torch.randn(BATCH, 16, FRAMES),
        "labels": torch.randint(3, WORDS, (BATCH, TOKENS)),
    }


def _pairs(kind: str, head: str, **options: Any) -> Build:
    """Pictures with their words."""

    def build() -> tuple[nn.Module, Batch]:
        small = {key: value for key, value in SMALL.items() if key != "use_cache"}
        seen = {**small, **IMAGES}
        seen = {key: value for key, value in seen.items() if not key.endswith("_id") and key != "vocab_size"}
        both = {"text_config": small, "vision_config": seen, "projection_dim": 32, **options}
        words = _words()
        batch = {"input_ids": words["input_ids"], "attention_mask": words["attention_mask"]}
        return _model(kind, head, both), {
            **batch,
            "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE),
            "return_loss": True,
        }

    return build


def _asked() -> tuple[nn.Module, Batch]:
    """Words and a picture in one sequence."""
    words = _words()
    return _model("vilt", "ViltForQuestionAnswering", {**IMAGES, "max_image_length": -1}), {
        "input_ids": words["input_ids"],
        "attention_mask": words["attention_mask"],
        "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE),
        "labels": torch.rand(BATCH, CLASSES),
    }


def _boxes() -> tuple[nn.Module, Batch]:
    """Without the matching of its loss, which scipy does."""
    resnet = {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "out_features": ["stage2"],
    }
    options = {
        **TWO_STACKS,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": resnet,
        "num_queries": 6,
    }
    return _model("detr", "DetrModel", options), {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE)}


def _series() -> tuple[nn.Module, Batch]:
    options = {
        "num_input_channels": 3,
        "context_length": TOKENS,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 32,
        "ffn_dim": 64,
        "prediction_length": 4,
    }
    model = _model("patchtst", "PatchTSTForPrediction", options)
    return model, {"past_values": torch.randn(BATCH, TOKENS, 3), "future_values": torch.randn(BATCH, 4, 3)}


HUGGING_FACE: Mapping[str, Build] = {
    # Language models
    "gpt2": _causal("gpt2", "GPT2LMHeadModel", loss_type="ForCausalLM"),
    "llama": _causal("llama", "LlamaForCausalLM", **FEW_HEADS),
    "mistral": _causal("mistral", "MistralForCausalLM", **FEW_HEADS, sliding_window=8),
    "qwen2": _causal("qwen2", "Qwen2ForCausalLM", **FEW_HEADS),
    "qwen3": _causal("qwen3", "Qwen3ForCausalLM", **FEW_HEADS),
    "gemma": _causal("gemma", "GemmaForCausalLM", **FEW_HEADS),
    "gemma3": _causal("gemma3_text", "Gemma3ForCausalLM", **FEW_HEADS, sliding_window=8),
    "phi": _causal("phi", "PhiForCausalLM"),
    "phi3": _causal("phi3", "Phi3ForCausalLM", num_key_value_heads=2),
    "olmo2": _causal("olmo2", "Olmo2ForCausalLM", num_key_value_heads=2),
    "gpt_neox": _causal("gpt_neox", "GPTNeoXForCausalLM"),
    "falcon": _causal("falcon", "FalconForCausalLM"),
    "bloom": _causal("bloom", "BloomForCausalLM"),
    "opt": _causal("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    "gptj": _causal("gptj", "GPTJForCausalLM", rotary_dim=4),
    # Mixtures of experts
    "mixtral": _causal("mixtral", "MixtralForCausalLM", **EXPERTS),
    "qwen3_moe": _causal("qwen3_moe", "Qwen3MoeForCausalLM", **EXPERTS),
    "olmoe": _causal("olmoe", "OlmoeForCausalLM", **EXPERTS),
    "deepseek_v2": _causal("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT, topk_method="greedy"),
    "deepseek_v3": _causal("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT),
    "gpt_oss": _causal("gpt_oss", "GptOssForCausalLM", **EXPERTS, sliding_window=8),
    # Recurrent ones
    "mamba": _causal("mamba", "MambaForCausalLM", state_size=8),
    "mamba2": _causal("mamba2", "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "rwkv": _causal("rwkv", "RwkvForCausalLM", attention_hidden_size=32, context_length=64),
    "recurrent_gemma": _causal("recurrent_gemma", "RecurrentGemmaForCausalLM", num_key_value_heads=2, lru_width=32),
    # Encoders
    "bert": _gapped("bert", "BertForMaskedLM"),
    "roberta": _gapped("roberta", "RobertaForMaskedLM"),
    "albert": _gapped("albert", "AlbertForMaskedLM", embedding_size=16),
    "electra": _gapped("electra", "ElectraForMaskedLM", embedding_size=16),
    "distilbert": _gapped("distilbert", "DistilBertForMaskedLM", hidden_dim=64),
    "deberta": _gapped(
        "deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], pooler_hidden_size=32
    ),
    "deberta_v2": _gapped(
        "deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8
    ),
    "modernbert": _gapped("modernbert", "ModernBertForMaskedLM", local_attention=8),
    "xlnet": _causal("xlnet", "XLNetLMHeadModel", d_inner=64, d_head=8),
    # An encoder and a decoder
    "t5": _translated("t5", "T5ForConditionalGeneration", d_ff=64, d_kv=8, decoder_start_token_id=0),
    "bart": _translated("bart", "BartForConditionalGeneration", **TWO_STACKS),
    "pegasus": _translated("pegasus", "PegasusForConditionalGeneration", **TWO_STACKS),
    # Sound
    "whisper": _whisper,
    "wav2vec2": _sound("wav2vec2", "Wav2Vec2ForSequenceClassification"),
    "hubert": _sound("hubert", "HubertForSequenceClassification"),
    "wavlm": _sound("wavlm", "WavLMForSequenceClassification"),
    "ast": _spectrum,
    # Pictures
    "vit": _pictures("vit", "ViTForImageClassification"),
    "dinov2": _pictures("dinov2", "Dinov2ForImageClassification"),
    "beit": _pictures("beit", "BeitForImageClassification"),
    "swin": _pictures(
        "swin",
        "SwinForImageClassification",
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        patch_size=2,
        drop_path_rate=0.1,
    ),
    "convnext": _pictures(
        "convnext", "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4
    ),
    "resnet": _pictures(
        "resnet", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]
    ),
    "mobilevit": _pictures(
        "mobilevit",
        "MobileViTForImageClassification",
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
        patch_size=2,
        output_stride=32,
    ),
    "segformer": _outlines(
        "segformer",
        "SegformerForSemanticSegmentation",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
    ),
    "detr": _boxes,
    # Several at once
    "clip": _pairs("clip", "CLIPModel"),
    "siglip": _pairs("siglip", "SiglipModel"),
    "vilt": _asked,
    "patchtst": _series,
}
