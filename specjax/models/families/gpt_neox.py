"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia: parallel branches, partial rotary."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import activation, activation_name, check_sizes, flag, number
from specjax.models.families.llama import dense
from specjax.models.families.positions import read_context, read_rope, write_positions


def _read(config: Config) -> TransformerConfig:
    check_sizes(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings",
    )  # fmt: skip
    bias = flag(config, "attention_bias", True)
    theta = number(config, "rotary_emb_base", 10000.0, above=1.0, most=1e15)
    rope = read_rope(config, theta, number(config, "rotary_pct", 0.25, most=1.0))
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        mlp_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        max_positions=read_context(config, rope),
        rope=rope,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5, least=0.0, most=1.0),
        norm_order="parallel" if flag(config, "use_parallel_residual", True) else "pre",
        qkv_bias=bias,
        out_bias=bias,
        activation=activation(config.get("hidden_act", "gelu")),
        gated=False,
        mlp_bias=True,
        init_scale=number(config, "initializer_range", 0.02, least=0.0),
        family="gpt_neox",
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    positions = write_positions(c)
    return {
        "model_type": "gpt_neox",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.mlp_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "max_position_embeddings": positions["max_position_embeddings"],
        "rotary_emb_base": c.rope.theta,
        "rotary_pct": c.rope.fraction,
        "rope_scaling": positions["rope_scaling"],
        "tie_word_embeddings": c.tied_embeddings,
        "layer_norm_eps": c.norm_eps,
        "use_parallel_residual": c.norm_order == "parallel",
        "attention_bias": c.qkv_bias,
        "hidden_act": activation_name(c.activation),
        "initializer_range": c.init_scale,
    }


def _tensors(c: TransformerConfig) -> list[Tensor]:
    rows = [Tensor("gpt_neox.embed_in.weight", ("embedding",))]
    if not c.tied_embeddings:
        rows += dense("embed_out", ("head",), False)

    def norm(name: str, path: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(f"gpt_neox.{name}.{kind}", (*path, kind)) for kind in ("weight", "bias")]

    rows += norm("final_layer_norm", ("norm",))
    # The fused matrix holds query, key and value of one head after the other.
    heads, size, width = c.num_heads, c.head_dim, c.hidden_size
    for i in range(c.num_layers):
        theirs, ours = f"layers.{i}", f"layer_{i}"
        rows += norm(f"{theirs}.input_layernorm", (ours, "attention_norm"))
        rows += norm(f"{theirs}.post_attention_layernorm", (ours, "mlp_norm"))
        name = f"gpt_neox.{theirs}.attention.query_key_value"
        for n, part in enumerate("qkv"):
            path, index, width_out = (ours, "attention", part), (slice(None), n), 3 * heads * size
            rows.append(
                Tensor(
                    f"{name}.weight", (*path, "kernel"), transpose=True,
                    shape=(width_out, width), view=(heads, 3, size, width), index=index,
                )
            )  # fmt: skip
            if c.qkv_bias:
                bias = Tensor(
                    f"{name}.bias",
                    (*path, "bias"),
                    shape=(width_out,),
                    view=(heads, 3, size),
                    index=index,
                )
                rows.append(bias)
        rows += dense(f"gpt_neox.{theirs}.attention.dense", (ours, "attention", "o"), c.out_bias)
        rows += dense(f"gpt_neox.{theirs}.mlp.dense_h_to_4h", (ours, "mlp", "up"), True)
        rows += dense(f"gpt_neox.{theirs}.mlp.dense_4h_to_h", (ours, "mlp", "down"), True)
    return rows


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    _read,
    _write,
    _tensors,
    # Causal masks and rotary frequencies.
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
