"""The zoo: models that others wrote, by name, unmodified and tiny; nothing is downloaded and no weights are loaded.

A model is one line: its name, and a builder of ``building.py`` with the class and the options of a small config.
Dropout and all else that the line does not name is what the package has by default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zoo.building import (
    CLASSES,
    HEADS,
    LAYERS,
    PATCHES,
    PICTURE,
    SAMPLES,
    TOKENS,
    VOCABULARY,
    WAVE,
    WIDTH,
    Batch,
    Built,
    InnerLoss,
    MeanLoss,
    ZooLoss,
    adapted,
    audio,
    classes,
    decoder,
    decoder_with_labels,
    encoder,
    encoder_decoder,
    features,
    images_and_text,
    language,
    pretrained,
    tokens,
    vision,
    vit_pytorch,
    x_transformer,
)


@dataclass(frozen=True)
class ZooModel:
    """One model: its name, the package that wrote it (as PyPI calls it), its family, and how it is built."""

    name: str
    package: str
    family: str
    builder: Callable[[], Built]
    loss: Callable[[], nn.Module] = ZooLoss

    def build(self) -> tuple[nn.Module, nn.Module, Batch]:
        """The model with seeded values, its loss, and one batch."""
        torch.manual_seed(0)
        model, batch = self.builder()
        return model, self.loss(), batch


def clip() -> Built:
    parts = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    parts |= {"num_attention_heads": HEADS}
    text = {**parts, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * TOKENS, "eos_token_id": 2}
    picture = {**parts, "image_size": PICTURE, "patch_size": 8}
    model = pretrained("CLIPModel", text_config=text, vision_config=picture, projection_dim=WIDTH)
    ids = tokens()
    ids[:, -1] = 2
    inputs = {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, PICTURE, PICTURE)}
    return model, (inputs, torch.randn(SAMPLES, WIDTH))


def vilt() -> Built:
    model = pretrained("ViltForQuestionAnswering", image_size=PICTURE, patch_size=8, max_image_length=16)
    inputs = {"input_ids": tokens(), "pixel_values": torch.randn(SAMPLES, 3, PICTURE, PICTURE)}
    return model, (inputs, classes())


def whisper() -> Built:
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS}
    layers |= {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH}
    model = pretrained(
        "WhisperForConditionalGeneration", **layers, d_model=WIDTH, num_mel_bins=8, max_source_positions=TOKENS,
        max_target_positions=2 * TOKENS, decoder_start_token_id=1,
    )  # fmt: skip
    ids = tokens(TOKENS + 1)
    inputs = {"input_features": torch.randn(SAMPLES, 8, 2 * TOKENS), "decoder_input_ids": ids[:, :-1]}
    return model, (inputs, ids[:, 1:])


def moonshine() -> Built:
    kind = importlib.import_module("transformers").MoonshineForConditionalGeneration
    config = kind.config_class(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, encoder_num_hidden_layers=LAYERS,
        decoder_num_hidden_layers=LAYERS, encoder_num_attention_heads=HEADS, decoder_num_attention_heads=HEADS,
        max_position_embeddings=4 * TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    ids = tokens(TOKENS + 1)
    return kind(config), (
        {"input_values": torch.randn(SAMPLES, 5 * WAVE), "decoder_input_ids": ids[:, :-1]},
        ids[:, 1:],
    )


def blip() -> Built:
    parts = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    parts |= {"num_attention_heads": HEADS}
    text = {**parts, "vocab_size": VOCABULARY, "max_position_embeddings": 4 * TOKENS, "encoder_hidden_size": WIDTH}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    picture = {**parts, "image_size": PICTURE, "patch_size": 8}
    model, ids = pretrained("BlipForConditionalGeneration", text_config=text, vision_config=picture), tokens()
    return model, ({"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, PICTURE, PICTURE)}, ids)


def patchtst() -> Built:
    kind = importlib.import_module("transformers").PatchTSTForPrediction
    config = kind.config_class(
        num_input_channels=3, context_length=WIDTH, patch_length=4, patch_stride=4, d_model=16,
        num_hidden_layers=LAYERS, num_attention_heads=2, ffn_dim=WIDTH, prediction_length=8,
    )  # fmt: skip
    inputs = {"past_values": torch.randn(SAMPLES, WIDTH, 3), "future_values": torch.randn(SAMPLES, 8, 3)}
    return kind(config), (inputs, torch.zeros(SAMPLES))


def time_series_transformer() -> Built:
    kind = importlib.import_module("transformers").TimeSeriesTransformerForPrediction
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 2}
    layers |= {"decoder_attention_heads": 2, "encoder_ffn_dim": WIDTH, "decoder_ffn_dim": WIDTH, "d_model": 16}
    config = kind.config_class(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, **layers
    )
    past, future = {"values": (10,), "time_features": (10, 1)}, {"values": (4,), "time_features": (4, 1)}
    inputs = {f"past_{name}": torch.randn(SAMPLES, *shape) for name, shape in past.items()}
    inputs |= {f"future_{name}": torch.randn(SAMPLES, *shape) for name, shape in future.items()}
    inputs["past_observed_mask"] = torch.ones(SAMPLES, 10)
    return kind(config), (inputs, torch.zeros(SAMPLES))


def spectrogram() -> Built:
    model = pretrained(
        "ASTForAudioClassification", patch_size=8, num_mel_bins=16, max_length=32, frequency_stride=8, time_stride=8
    )
    return model, ({"input_values": torch.randn(SAMPLES, 32, 16)}, classes())


def perceiver() -> Built:
    model, (_, targets) = language(
        "perceiver_pytorch", "Perceiver", num_freq_bands=4, depth=LAYERS, max_freq=8.0, num_latents=8, latent_dim=WIDTH,
        cross_heads=1, latent_heads=HEADS, cross_dim_head=8, latent_dim_head=8, num_classes=CLASSES,
    )  # fmt: skip
    del targets
    return model, (torch.randn(SAMPLES, 8, 8, 3), classes())


FUNNEL = {
    "num_hidden_layers": None,
    "block_sizes": [1, 1],
    "d_model": WIDTH,
    "n_head": HEADS,
    "d_head": 8,
    "d_inner": 64,
}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_heads": HEADS, "num_layers": LAYERS}
LLAMA = {"model_type": "llama"}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
INTERN = {"model_type": "internvl_vision", "image_size": [PICTURE, PICTURE], "patch_size": [8, 8]}
GEMMA3 = {
    "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
SWIN = {
    "num_hidden_layers": None, "num_attention_heads": None, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
    "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
STAGES = {"num_hidden_layers": None, "hidden_sizes": [16, 32], "depths": [1, 1]}

TRANSFORMERS: dict[str, dict[str, Callable[[], Built]]] = {
    "decoder": {
        "gpt2": partial(decoder, "GPT2LMHeadModel"),
        "gpt2 with labels": partial(decoder_with_labels, "GPT2LMHeadModel"),
        "gpt-neo": partial(decoder, "GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=8),
        "gpt-neox": partial(decoder, "GPTNeoXForCausalLM"),
        "gpt-j": partial(decoder, "GPTJForCausalLM", rotary_dim=4),
        "gpt-bigcode": partial(decoder, "GPTBigCodeForCausalLM"),
        "codegen": partial(decoder, "CodeGenForCausalLM", rotary_dim=4),
        "opt": partial(decoder, "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=WIDTH),
        "bloom": partial(decoder, "BloomForCausalLM"),
        "falcon": partial(decoder, "FalconForCausalLM"),
        "mpt": partial(decoder, "MptForCausalLM", max_seq_len=64),
        "llama": partial(decoder, "LlamaForCausalLM", num_key_value_heads=2),
        "mistral": partial(decoder, "MistralForCausalLM", num_key_value_heads=2, sliding_window=8),
        "mixtral": partial(decoder, "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4),
        "qwen2": partial(decoder, "Qwen2ForCausalLM", num_key_value_heads=2),
        "qwen2-moe": partial(
            decoder, "Qwen2MoeForCausalLM", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, shared_expert_intermediate_size=32,
        ),
        "qwen3": partial(decoder, "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
        "gemma": partial(decoder, "GemmaForCausalLM", num_key_value_heads=1, head_dim=8),
        "gemma2": partial(decoder, "Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8),
        "gemma3": partial(decoder, "Gemma3ForCausalLM", num_key_value_heads=2, head_dim=8),
        "phi": partial(decoder, "PhiForCausalLM"),
        "phi3": partial(decoder, "Phi3ForCausalLM", num_key_value_heads=2),
        "stablelm": partial(decoder, "StableLmForCausalLM", num_key_value_heads=2),
        "starcoder2": partial(decoder, "Starcoder2ForCausalLM", num_key_value_heads=2),
        "olmo": partial(decoder, "OlmoForCausalLM"),
        "olmo2": partial(decoder, "Olmo2ForCausalLM"),
        "olmoe": partial(decoder, "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
        "cohere": partial(decoder, "CohereForCausalLM", num_key_value_heads=2),
        "persimmon": partial(decoder, "PersimmonForCausalLM"),
        "granite": partial(decoder, "GraniteForCausalLM", num_key_value_heads=2),
        "xglm": partial(decoder, "XGLMForCausalLM", ffn_dim=64),
        "biogpt": partial(decoder, "BioGptForCausalLM"),
        "mamba": partial(decoder, "MambaForCausalLM", state_size=4),
        "rwkv": partial(decoder, "RwkvForCausalLM", attention_hidden_size=WIDTH, context_length=64),
        "doge": partial(decoder, "DogeForCausalLM", num_key_value_heads=2),
        "gpt-oss": partial(
            decoder, "GptOssForCausalLM", num_key_value_heads=2, head_dim=8, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        ),
        "deepseek-v3": partial(
            decoder, "DeepseekV3ForCausalLM", num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
            n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, moe_intermediate_size=16,
        ),
        "mamba2": partial(
            decoder, "Mamba2ForCausalLM", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8,
            num_attention_heads=None,
        ),
    },
    "encoder": {
        "bert": partial(encoder, "BertForMaskedLM"),
        "roberta": partial(encoder, "RobertaForMaskedLM"),
        "xlm-roberta": partial(encoder, "XLMRobertaForMaskedLM"),
        "camembert": partial(encoder, "CamembertForMaskedLM"),
        "distilbert": partial(encoder, "DistilBertForMaskedLM", hidden_dim=64),
        "albert": partial(encoder, "AlbertForMaskedLM", embedding_size=16),
        "electra": partial(encoder, "ElectraForMaskedLM", embedding_size=16),
        "deberta": partial(encoder, "DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        "deberta-v2": partial(encoder, "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        "mpnet": partial(encoder, "MPNetForMaskedLM"),
        "modernbert": partial(encoder, "ModernBertForMaskedLM", local_attention=8, cls_token_id=1, sep_token_id=2),
        "longformer": partial(encoder, "LongformerForMaskedLM", attention_window=[8, 8]),
        "funnel": partial(encoder, "FunnelForMaskedLM", **FUNNEL),
        "fnet": partial(encoder, "FNetForMaskedLM"),
        "squeezebert": partial(encoder, "SqueezeBertForMaskedLM", embedding_size=WIDTH),
        "convbert": partial(encoder, "ConvBertForMaskedLM", embedding_size=WIDTH),
        "esm": partial(encoder, "EsmForMaskedLM", mask_token_id=3, position_embedding_type="rotary"),
    },
    "encoder-decoder": {
        "t5": partial(encoder_decoder, "T5ForConditionalGeneration", **T5),
        "bart": partial(encoder_decoder, "BartForConditionalGeneration", d_model=WIDTH),
        "mbart": partial(encoder_decoder, "MBartForConditionalGeneration", d_model=WIDTH),
        "pegasus": partial(encoder_decoder, "PegasusForConditionalGeneration", d_model=WIDTH),
        "marian": partial(encoder_decoder, "MarianMTModel", d_model=WIDTH, decoder_vocab_size=VOCABULARY),
        "m2m-100": partial(encoder_decoder, "M2M100ForConditionalGeneration", d_model=WIDTH),
        "whisper": whisper,
        "longt5": partial(
            encoder_decoder, "LongT5ForConditionalGeneration", **T5, num_decoder_layers=LAYERS, local_radius=4,
            encoder_attention_type="local",
        ),
        "moonshine": moonshine,
    },
    "vision": {
        "vit": partial(vision, "ViTForImageClassification"),
        "deit": partial(vision, "DeiTForImageClassification"),
        "beit": partial(vision, "BeitForImageClassification"),
        "dinov2": partial(vision, "Dinov2ForImageClassification"),
        "swin": partial(vision, "SwinForImageClassification", **SWIN),
        "convnext": partial(vision, "ConvNextForImageClassification", **STAGES, num_stages=2),
        "resnet": partial(vision, "ResNetForImageClassification", **STAGES, embedding_size=16),
        "regnet": partial(vision, "RegNetForImageClassification", **STAGES, embedding_size=16, groups_width=8),
        "segformer": partial(
            vision, "SegformerForSemanticSegmentation", (8, 8), num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
            hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
            decoder_hidden_size=32,
        ),
        "poolformer": partial(
            vision, "PoolFormerForImageClassification", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1],
        ),
        "mobilenet-v2": partial(
            vision, "MobileNetV2ForImageClassification", depth_multiplier=0.25, output_stride=8,  # leaves 4 x 4
        ),
        "hiera": partial(
            vision, "HieraForImageClassification", num_hidden_layers=None, num_attention_heads=None, embed_dim=16,
            depths=[1, 1], num_heads=[1, 2], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3],
            masked_unit_size=[4, 4], num_query_pool=1, query_stride=[2, 2], image_size=[PICTURE, PICTURE],
        ),
    },
    "audio": {
        "wav2vec2": partial(audio, "Wav2Vec2ForSequenceClassification"),
        "hubert": partial(audio, "HubertForSequenceClassification"),
        "wavlm": partial(audio, "WavLMForSequenceClassification"),
        "ast": spectrogram,
    },
    "time series": {
        "patchtst": patchtst,
        "time series transformer": time_series_transformer,
    },
    "multimodal": {
        "clip": clip,
        "blip": blip,
        "vilt": vilt,
        "llava": partial(
            images_and_text, "LlavaForConditionalGeneration", 16, LLAMA, {"model_type": "clip_vision_model"},
            token="image_token_index", vision_feature_layer=-1,
        ),
        "paligemma": partial(
            images_and_text, "PaliGemmaForConditionalGeneration", 16,
            {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8}, SIGLIP, projection_dim=WIDTH,
        ),
        "gemma3 with images": partial(
            images_and_text, "Gemma3ForConditionalGeneration", 4, GEMMA3, SIGLIP, mm_tokens_per_image=4,
        ),
        "idefics3": partial(
            images_and_text, "Idefics3ForConditionalGeneration", 4, LLAMA, {}, one_of_several=True, scale_factor=2,
        ),
        "internvl": partial(
            images_and_text, "InternVLForConditionalGeneration", 4, {"model_type": "qwen2"}, INTERN,
            downsample_ratio=0.5,
        ),
        "mistral3": partial(
            images_and_text, "Mistral3ForConditionalGeneration", 4, {"model_type": "mistral", "head_dim": 8},
            {"model_type": "pixtral", "head_dim": 8}, sizes=True, token="image_token_index", spatial_merge_size=2,
        ),
    },
}  # fmt: skip

X_TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "x decoder": partial(x_transformer),
    "x encoder": partial(x_transformer, "Encoder"),
    "x rotary and swiglu": partial(x_transformer, rotary_pos_emb=True, ff_glu=True, ff_swish=True),
    "x rmsnorm without bias": partial(x_transformer, use_rmsnorm=True, ff_no_bias=True),
    "x flash and kv heads": partial(x_transformer, attn_flash=True, attn_kv_heads=2),
    "x one kv head": partial(x_transformer, attn_one_kv_head=True),
    "x alibi": partial(x_transformer, alibi_pos_bias=True, alibi_num_heads=2),
    "x relative bias": partial(x_transformer, rel_pos_bias=True),
    "x tied embedding": partial(x_transformer, tie_embedding=True),
    "x memory tokens": partial(x_transformer, num_memory_tokens=4),
    "x qk norm and sandwich": partial(x_transformer, attn_qk_norm=True, sandwich_norm=True),
    "x dropout": partial(x_transformer, attn_dropout=0.1, ff_dropout=0.1),
    "x macaron and gated residual": partial(x_transformer, macaron=True, gate_residual=True),
}

PEFT: dict[str, Callable[[], Built]] = {
    "llama with lora": partial(adapted, "LlamaForCausalLM", ["q_proj", "v_proj"], num_key_value_heads=2),
    "gpt2 with lora": partial(adapted, "GPT2LMHeadModel", ["c_attn", "c_proj"]),
}

VIT_PYTORCH: dict[str, Callable[[], Built]] = {
    "vit-pytorch vit": partial(vit_pytorch, "vit", "ViT", **PATCHES, dropout=0.1, emb_dropout=0.1),
    "simple vit": partial(vit_pytorch, "simple_vit", "SimpleViT", **PATCHES),
    "deepvit": partial(vit_pytorch, "deepvit", "DeepViT", **PATCHES),
    "cait": partial(vit_pytorch, "cait", "CaiT", **PATCHES, cls_depth=1),
    "parallel vit": partial(vit_pytorch, "parallel_vit", "ViT", **PATCHES),
    "vit for small data": partial(vit_pytorch, "vit_for_small_dataset", "ViT", **PATCHES),
    "max vit": partial(
        vit_pytorch, "max_vit", "MaxViT", dim=16, depth=(1, 1), dim_head=8, dim_conv_stem=16, window_size=4,
    ),
}  # fmt: skip

OTHERS: dict[str, tuple[str, Callable[[], Built]]] = {
    "linformer": (
        "linformer",
        partial(
            language, "linformer", "LinformerLM", num_tokens=VOCABULARY, dim=WIDTH, seq_len=TOKENS, depth=LAYERS,
            heads=HEADS, k=8,
        ),
    ),
    "performer": (
        "performer-pytorch",
        partial(
            language, "performer_pytorch", "PerformerLM", num_tokens=VOCABULARY, max_seq_len=TOKENS, dim=WIDTH,
            depth=LAYERS, heads=HEADS, dim_head=8, nb_features=16,
        ),
    ),
    "local transformer": (
        "local-attention",
        partial(
            language, "local_attention", "LocalTransformer", num_tokens=VOCABULARY, max_seq_len=TOKENS, dim=WIDTH,
            depth=LAYERS, heads=HEADS, dim_head=8, local_attn_window_size=8, num_residual_streams=1,
        ),
    ),
    "nystromformer": (
        "nystrom-attention",
        partial(
            features, "nystrom_attention", "Nystromformer", dim=WIDTH, depth=LAYERS, heads=HEADS, dim_head=8,
            num_landmarks=4,
        ),
    ),
    "conformer": (
        "conformer",
        partial(
            features, "conformer", "Conformer", dim=WIDTH, depth=LAYERS, heads=HEADS, dim_head=8, conv_kernel_size=5
        ),
    ),
    "perceiver": ("perceiver-pytorch", perceiver),
}  # fmt: skip


def every_model() -> dict[str, ZooModel]:
    """All models by name, in the order of the table."""
    found = []
    for family, builders in TRANSFORMERS.items():
        found += [ZooModel(name, "transformers", family, builder) for name, builder in builders.items()]
    for package, family, builders in (
        ("peft", "decoder", PEFT), ("x-transformers", "x-transformers", X_TRANSFORMERS),
        ("vit-pytorch", "vision", VIT_PYTORCH),
    ):  # fmt: skip
        found += [ZooModel(name, package, family, builder) for name, builder in builders.items()]
    found += [ZooModel(name, package, "other", builder) for name, (package, builder) in OTHERS.items()]
    inner = {"gpt2 with labels": InnerLoss, "patchtst": MeanLoss, "time series transformer": MeanLoss}
    return {
        each.name: ZooModel(each.name, each.package, each.family, each.builder, inner.get(each.name, ZooLoss))
        for each in found
    }


MODELS = every_model()
