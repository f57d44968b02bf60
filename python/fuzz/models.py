"""Tiny models of the transformers package, every tensor placed at random: losses, logits, gradients."""

import random
from typing import Any

import modules
import torch
import transformers
from modules import compute as compute

USES = [modules]

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
TWO_SIDED = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGES = {"image_size": 8, "num_channels": 3, "num_labels": 5}
EXPERTS = {**GROUPED, "experts_implementation": "eager"}

#: What the config of each has besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {"embedding_size": 8},
    "BartForConditionalGeneration": {**TWO_SIDED, "forced_eos_token_id": None},
    "BertForMaskedLM": {},
    "BloomForCausalLM": {},
    "ConvNextForImageClassification": {
        **IMAGES, "image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    },
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "DistilBertForMaskedLM": {"hidden_dim": 24},
    "ElectraForMaskedLM": {"embedding_size": 8},
    "FalconForCausalLM": {"alibi": False},
    "GPT2LMHeadModel": {"n_inner": 24},
    "GPTJForCausalLM": {"rotary_dim": 2},
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 4, "sliding_window": 4},
    "LlamaForCausalLM": GROUPED,
    "MambaForCausalLM": {"state_size": 4},
    "MistralForCausalLM": {**GROUPED, "sliding_window": 4},
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 3, "num_experts_per_tok": 2},
    "MptForCausalLM": {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2},
    "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "Phi3ForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 4},
    "RobertaForMaskedLM": {"type_vocab_size": 1},
    "T5ForConditionalGeneration": {
        "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1, "decoder_start_token_id": 0,
    },
    "ViTForImageClassification": {**IMAGES, "patch_size": 4},
    "WhisperForConditionalGeneration": {
        **TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    },
}  # fmt: skip
NAMES = list(FAMILIES)


def draw(name: str, rng: random.Random) -> tuple[dict[str, Any], str, tuple[float, float]]:
    """(options, mode, tolerance)"""
    options = {
        "name": name,
        "attention": rng.choice(["eager", "sdpa"]),
        "training": rng.choice([True, False]),
        "masked": rng.choice([True, False]),
        "tied": rng.choice([True, False]),
        "seed": rng.randrange(1000),
    }
    # Softmaxes and losses of the models are in float32.
    return (
        options,
        rng.choice(["gradients", "gradients", "gradients", "no_grad", "inference_mode"]),
        (1e-4, 1e-5),
    )


def make(name: str, attention: str, training: bool, masked: bool, tied: bool, seed: int) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    family = getattr(transformers, name)
    given = {**SMALL, **FAMILIES[name], "tie_word_embeddings": tied, "use_cache": False}
    dropouts = {
        key: 0.0
        for key, value in family.config_class().to_dict().items()
        if "drop" in key and isinstance(value, float)
    }
    config = family.config_class(**given, **dropouts)
    if getattr(family, "_supports_sdpa", False):
        config._attn_implementation = attention
    model = family(config).double().train(training)
    with torch.no_grad():
        for parameter in model.parameters():  # most biases are zero, weights of norms are one
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(3, 40, (4, 7))
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "Image" in name:
        inputs = {
            "pixel_values": torch.randn(4, 3, config.image_size, config.image_size, dtype=torch.float64)
        }
    elif "Whisper" in name:
        inputs = {"input_features": torch.randn(4, 8, 16, dtype=torch.float64)}
    elif masked:
        inputs["attention_mask"] = torch.ones_like(tokens).tril(4)
    return model, (), {**inputs, "labels": torch.arange(4) if "Image" in name else tokens}, 1
