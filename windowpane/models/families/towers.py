"""Vision and audio towers: listed so that a checkpoint's size can be checked, never loaded by the text engine.

Names and shapes are those of the checkpoints. Defaults are those of the config classes, since nested configs are saved
as differences from them. Towers carry no sharding and no quantization, because nothing here loads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from windowpane.models.config import Config
from windowpane.models.tensors import TensorSpec

Shapes = dict[str, tuple[int, ...]]


def gemma3(config: Config, hidden: int) -> list[TensorSpec]:
    """SigLIP and the projector of Gemma 3."""
    vision = config.section("vision_config")
    width, mlp_width = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 3072)
    patch, channels = vision.integer("patch_size", 16), vision.integer("num_channels", 3)
    patches = (vision.integer("image_size", 224) // patch) ** 2
    layer = _biased("self_attn.q_proj", width, width) | _biased("self_attn.k_proj", width, width)
    layer |= _biased("self_attn.v_proj", width, width) | _biased("self_attn.out_proj", width, width)
    layer |= _biased("mlp.fc1", mlp_width, width) | _biased("mlp.fc2", width, mlp_width)
    layer |= _biased("layer_norm1", width) | _biased("layer_norm2", width)
    shapes = _biased("embeddings.patch_embedding", width, channels, patch, patch)
    shapes |= {"embeddings.position_embedding.weight": (patches, width)}
    shapes |= _layers("encoder.layers.", vision.layers("num_hidden_layers", 12), layer)
    shapes |= _biased("post_layernorm", width)
    projector: Shapes = {"mm_input_projection_weight": (width, hidden), "mm_soft_emb_norm.weight": (width,)}
    return [
        *_tensors("vision", "vision_tower.vision_model.", shapes),
        *_tensors("vision", "multi_modal_projector.", projector),
    ]


def gemma3n(config: Config, hidden: int) -> list[TensorSpec]:
    """The audio tower and both embedders of Gemma 3n. Its vision tower is defined by timm, not here."""
    tensors: list[TensorSpec] = []
    if config.has("vision_config"):
        tensors += _gemma3n_embedder("vision", config.section("vision_config"), 2048, hidden)
    if config.has("audio_config"):
        audio = config.section("audio_config")
        tensors += _gemma3n_embedder("audio", audio, 1536, hidden)
        tensors += _gemma3n_audio(audio)
    return tensors


def _gemma3n_embedder(tower: str, section: Config, default_width: int, hidden: int) -> list[TensorSpec]:
    width = section.integer("hidden_size", default_width)
    shapes: Shapes = {
        "embedding.weight": (section.integer("vocab_size", 128), width),
        "hard_embedding_norm.weight": (width,),
        "soft_embedding_norm.weight": (width,),
        "embedding_projection.weight": (hidden, width),
    }
    return _tensors(tower, f"model.embed_{tower}.", shapes)


def _gemma3n_audio(audio: Config) -> list[TensorSpec]:
    width = audio.integer("hidden_size", 1536)
    heads = audio.integer("conf_num_attention_heads", 8)
    layer: Shapes = {}
    for block in ("ffw_layer_start", "ffw_layer_end"):
        layer |= {
            f"{block}.pre_layer_norm.weight": (width,),
            f"{block}.ffw_layer_1.weight": (4 * width, width),
            f"{block}.ffw_layer_2.weight": (width, 4 * width),
            f"{block}.post_layer_norm.weight": (width,),
        }
    square = ("attn.relative_position_embedding.pos_proj", "attn.q_proj", "attn.k_proj", "attn.v_proj", "post")
    layer |= {f"attention.{name}.weight": (width, width) for name in square}
    layer |= {f"attention.{name}.weight": (width,) for name in ("pre_attn_norm", "post_norm")}
    layer |= {"attention.attn.per_dim_scale": (width // heads,), "norm.weight": (width,)}
    layer |= _light_convolution(width, audio.integer("conf_conv_kernel_size", 5), linear=".weight")
    first, second = audio.integers("sscp_conv_channel_size") or (128, 32)
    shapes: Shapes = {
        "subsample_conv_projection.conv_0.conv.weight": (first, 1, 3, 3),
        "subsample_conv_projection.conv_0.norm.weight": (first,),
        "subsample_conv_projection.conv_1.conv.weight": (second, first, 3, 3),
        "subsample_conv_projection.conv_1.norm.weight": (second,),
        # Two convolutions of stride 2 leave a quarter of the input features per channel.
        "subsample_conv_projection.input_proj_linear.weight": (
            width,
            second * audio.integer("input_feat_size", 128) // 4,
        ),
    }
    shapes |= _layers("conformer.", audio.layers("conf_num_hidden_layers", 12), layer)
    return _tensors("audio", "model.audio_tower.", shapes)


def gemma4(config: Config, hidden: int) -> list[TensorSpec]:
    tensors: list[TensorSpec] = []
    if config.has("vision_config"):
        tensors += _gemma4_vision(config.section("vision_config"), hidden)
    if config.has("audio_config"):
        tensors += _gemma4_audio(config.section("audio_config"), hidden)
    return tensors


def _gemma4_vision(vision: Config, hidden: int) -> list[TensorSpec]:
    width, mlp_width = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 3072)
    head_dim = vision.integer("head_dim", 64)
    query = vision.integer("num_attention_heads", 12) * head_dim
    kv = vision.integer("num_key_value_heads", 12) * head_dim
    clipped = vision.flag("use_clipped_linears", False)
    layer = _clipped("self_attn.q_proj", query, width, clipped) | _clipped("self_attn.k_proj", kv, width, clipped)
    layer |= _clipped("self_attn.v_proj", kv, width, clipped) | _clipped("self_attn.o_proj", width, query, clipped)
    layer |= _clipped("mlp.gate_proj", mlp_width, width, clipped) | _clipped("mlp.up_proj", mlp_width, width, clipped)
    layer |= _clipped("mlp.down_proj", width, mlp_width, clipped)
    layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer |= {f"{name}.weight": (width,) for name in norms}
    shapes: Shapes = {
        "patch_embedder.position_embedding_table": (2, vision.integer("position_embedding_size", 10240), width),
        "patch_embedder.input_proj.weight": (width, 3 * vision.integer("patch_size", 16) ** 2),
    }
    if vision.flag("standardize", False):
        shapes |= {"std_bias": (width,), "std_scale": (width,)}
    shapes |= _layers("encoder.layers.", vision.layers("num_hidden_layers", 16), layer)
    embedder: Shapes = {"embedding_projection.weight": (hidden, width)}
    return [
        *_tensors("vision", "model.vision_tower.", shapes),
        *_tensors("vision", "model.embed_vision.", embedder),
    ]


def _gemma4_audio(audio: Config, hidden: int) -> list[TensorSpec]:
    width = audio.integer("hidden_size", 1024)
    clipped = audio.flag("use_clipped_linears", True)
    layer: Shapes = {}
    for block in ("feed_forward1", "feed_forward2"):
        layer |= _clipped(f"{block}.ffw_layer_1", 4 * width, width, clipped)
        layer |= _clipped(f"{block}.ffw_layer_2", width, 4 * width, clipped)
        layer |= {f"{block}.pre_layer_norm.weight": (width,), f"{block}.post_layer_norm.weight": (width,)}
    for name in ("q_proj", "k_proj", "v_proj", "post"):
        layer |= _clipped(f"self_attn.{name}", width, width, clipped)
    layer |= {
        "self_attn.relative_k_proj.weight": (width, width),
        "self_attn.per_dim_scale": (width // audio.integer("num_attention_heads", 8),),
    }
    layer |= _light_convolution(width, audio.integer("conv_kernel_size", 5), linear=".linear.weight")
    if clipped:
        layer |= _clip_bounds("lconv1d.linear_start") | _clip_bounds("lconv1d.linear_end")
    layer |= {f"{name}.weight": (width,) for name in ("norm_pre_attn", "norm_post_attn", "norm_out")}
    first, second = audio.integers("subsampling_conv_channels") or (128, 32)
    output = audio.integer("output_proj_dims", 1536)
    shapes: Shapes = {
        "subsample_conv_projection.layer0.conv.weight": (first, 1, 3, 3),
        "subsample_conv_projection.layer0.norm.weight": (first,),
        "subsample_conv_projection.layer1.conv.weight": (second, first, 3, 3),
        "subsample_conv_projection.layer1.norm.weight": (second,),
        # The model code fixes this Linear to the first convolution's channels / 4 per channel of the second.
        "subsample_conv_projection.input_proj_linear.weight": (width, first // 4 * second),
    }
    shapes |= _layers("layers.", audio.layers("num_hidden_layers", 12), layer) | _biased("output_proj", output, width)
    embedder: Shapes = {"embedding_projection.weight": (hidden, output)}
    return [
        *_tensors("audio", "model.audio_tower.", shapes),
        *_tensors("audio", "model.embed_audio.", embedder),
    ]


def gemma4_unified(config: Config, hidden: int) -> list[TensorSpec]:
    """Gemma 4 12B has embedders in place of towers."""
    tensors: list[TensorSpec] = []
    if config.has("vision_config"):
        vision = config.section("vision_config")
        width = vision.integer("mm_embed_dim", 3840)
        pixels = 3 * (vision.integer("patch_size", 16) * vision.integer("pooling_kernel_size", 3)) ** 2
        shapes = _biased("patch_ln1", pixels) | _biased("patch_dense", width, pixels) | _biased("patch_ln2", width)
        shapes |= {"pos_embedding": (vision.integer("mm_posemb_size", 1120), 2, width)} | _biased("pos_norm", width)
        tensors += _tensors("vision", "model.vision_embedder.", shapes)
        projection: Shapes = {"embedding_projection.weight": (hidden, vision.integer("output_proj_dims", 3840))}
        tensors += _tensors("vision", "model.embed_vision.", projection)
    if config.has("audio_config"):
        width = config.section("audio_config").integer("audio_embed_dim", 640)
        tensors += _tensors("audio", "model.embed_audio.", {"embedding_projection.weight": (hidden, width)})
    return tensors


def qwen3_5(config: Config) -> list[TensorSpec]:
    """The vision tower of Qwen3.5 and its successors."""
    vision = config.section("vision_config")
    width, mlp_width = vision.integer("hidden_size", 1152), vision.integer("intermediate_size", 4304)
    patch = vision.integer("patch_size", 16)
    merged = width * vision.integer("spatial_merge_size", 2) ** 2
    layer = _biased("norm1", width) | _biased("norm2", width)
    layer |= _biased("attn.qkv", 3 * width, width) | _biased("attn.proj", width, width)
    layer |= _biased("mlp.linear_fc1", mlp_width, width) | _biased("mlp.linear_fc2", width, mlp_width)
    frames = vision.integer("temporal_patch_size", 2)
    shapes = _biased("patch_embed.proj", width, vision.integer("in_channels", 3), frames, patch, patch)
    shapes |= {"pos_embed.weight": (vision.integer("num_position_embeddings", 2304), width)}
    shapes |= _layers("blocks.", vision.layers("depth", 27), layer)
    shapes |= _biased("merger.norm", width) | _biased("merger.linear_fc1", merged, merged)
    shapes |= _biased("merger.linear_fc2", vision.integer("out_hidden_size", 3584), merged)
    return _tensors("vision", "model.visual.", shapes)


def llama4(config: Config, hidden: int) -> list[TensorSpec]:
    vision = config.section("vision_config")
    width, mlp_width = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 5632)
    patch, channels = vision.integer("patch_size", 14), vision.integer("num_channels", 3)
    patches = (vision.integer("image_size", 448) // patch) ** 2
    layer = _biased("input_layernorm", width) | _biased("post_attention_layernorm", width)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer |= _biased(f"self_attn.{name}", width, width)
    layer |= _biased("mlp.fc1", mlp_width, width) | _biased("mlp.fc2", width, mlp_width)
    shapes: Shapes = {
        "class_embedding": (width,),
        # One position more than patches, for the class embedding.
        "positional_embedding_vlm": (patches + 1, width),
        "patch_embedding.linear.weight": (width, channels * patch**2),
    }
    shapes |= _biased("layernorm_pre", width) | _biased("layernorm_post", width)
    shapes |= _layers("model.layers.", vision.layers("num_hidden_layers", 34), layer)
    projected, output = vision.integer("projector_input_dim", 4096), vision.integer("projector_output_dim", 4096)
    shapes |= {
        "vision_adapter.mlp.fc1.weight": (projected, mlp_width),
        "vision_adapter.mlp.fc2.weight": (output, output),
    }
    vision_output = vision.integer("vision_output_dim", 7680)
    return [
        *_tensors("vision", "vision_model.", shapes),
        *_tensors("vision", "multi_modal_projector.", {"linear_1.weight": (hidden, vision_output)}),
    ]


def minimax_m3(config: Config, hidden: int) -> list[TensorSpec]:
    """A CLIP-like tower over patches of two frames, its projector, and the MLP that merges neighbouring patches."""
    vision = config.section("vision_config")
    width, mlp_width = vision.integer("hidden_size", 1280), vision.integer("intermediate_size", 5120)
    layer = _biased("layer_norm1", width) | _biased("layer_norm2", width)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= _biased(f"self_attn.{name}", width, width)
    layer |= _biased("mlp.fc1", mlp_width, width) | _biased("mlp.fc2", width, mlp_width)
    patch, channels = vision.integer("patch_size", 14), vision.integer("num_channels", 3)
    compression = config.section("img_token_compression_config")
    frames, merged = compression.integer("temporal_patch_size", 2), compression.integer("spatial_merge_size", 2) ** 2
    shapes: Shapes = {"embeddings.patch_embedding.weight": (width, channels, frames, patch, patch)}
    shapes |= _biased("pre_layrnorm", width)
    shapes |= _layers("encoder.layers.", vision.layers("num_hidden_layers", 32), layer)
    projected = config.integer("projector_hidden_size", hidden)
    projector = _biased("linear_1", projected, width) | _biased("linear_2", hidden, projected)
    merger = _biased("linear_1", projected, merged * hidden) | _biased("linear_2", hidden, projected)
    return [
        *_tensors("vision", "vision_tower.vision_model.", shapes),
        *_tensors("vision", "multi_modal_projector.", projector),
        *_tensors("vision", "patch_merge_mlp.", merger),
    ]


def _tensors(tower: str, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(f"{prefix}{name}", shape, tower=tower) for name, shape in shapes.items()]


def _layers(prefix: str, count: int, layer: Shapes) -> Shapes:
    return {f"{prefix}{index}.{name}": shape for index in range(count) for name, shape in layer.items()}


def _biased(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _clipped(name: str, rows: int, columns: int, clipped: bool) -> Shapes:
    shapes: Shapes = {f"{name}.linear.weight": (rows, columns)}
    return shapes | _clip_bounds(name) if clipped else shapes


def _clip_bounds(name: str) -> Shapes:
    return {f"{name}.{bound}": () for bound in ("input_min", "input_max", "output_min", "output_max")}


def _light_convolution(width: int, kernel: int, linear: str) -> Shapes:
    return {
        "lconv1d.pre_layer_norm.weight": (width,),
        f"lconv1d.linear_start{linear}": (2 * width, width),
        "lconv1d.depthwise_conv1d.weight": (width, 1, kernel),
        "lconv1d.conv_norm.weight": (width,),
        f"lconv1d.linear_end{linear}": (width, width),
    }
