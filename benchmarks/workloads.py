"""Engine-neutral workloads: token ids, output lengths and model shapes.

Every list is a pure function of its arguments (Python's random, fixed seed), so that another
engine run on the same workload gets the same token ids and the same output lengths.
GPU work (random weights, `SHAPES`): nano, b256x512x256, prefill64x4096, bs1_128_256, bs1_128_1.
CPU work (SmolLM2-135M, greedy, ignore_eos): cpu_w1, cpu_w2, cpu_w3.
"""

import json
import os
import random


def nano(seed=0, n=256, max_in=1024, max_out=1024, hi=10000):
    """The nano-vllm benchmark: all prompts are drawn first, then all output lengths."""
    r = random.Random(seed)  # same stream as random.seed(seed) + module functions
    prompts = [[r.randint(0, hi) for _ in range(r.randint(100, max_in))] for _ in range(n)]
    outs = [r.randint(100, max_out) for _ in range(n)]
    return prompts, outs


def fixed(n, n_in, n_out, seed=0, hi=10000):
    r = random.Random(seed * 1000003 + n * 7919 + n_in * 31 + n_out)
    return [[r.randint(0, hi) for _ in range(n_in)] for _ in range(n)], [n_out] * n


def cpu():
    """W1 throughput (32 x 128 in, 64 out), W2 single stream (64 in, 128 out), W3 shared prefix
    (16 x 512 common + 32 own, 32 out). One random stream, drawn in this order."""
    r = random.Random(1234)

    def ids(n):
        return [r.randrange(100, 49000) for _ in range(n)]

    w1 = [ids(128) for _ in range(32)]
    w2 = [ids(64)]
    prefix = ids(512)
    w3 = [prefix + ids(32) for _ in range(16)]
    return {"cpu_w1": (w1, [64] * 32), "cpu_w2": (w2, [128]), "cpu_w3": (w3, [32] * 16)}


SHAPES = {
    "qwen3-0.6b": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=1024,
        initializer_range=0.02,
        intermediate_size=3072,
        max_position_embeddings=40960,
        max_window_layers=28,
        num_attention_heads=16,
        num_hidden_layers=28,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "llama-3.1-8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128009,
        head_dim=128,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=128256,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        output_router_logits=False,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "deepseek-v2-lite": dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        attention_bias=False,
        attention_dropout=0.0,
        aux_loss_alpha=0.001,
        bos_token_id=100000,
        eos_token_id=100001,
        first_k_dense_replace=1,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=10944,
        kv_lora_rank=512,
        max_position_embeddings=163840,
        moe_intermediate_size=1408,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_attention_heads=16,
        num_experts_per_tok=6,
        num_hidden_layers=27,
        num_key_value_heads=16,
        pretraining_tp=1,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-6,
        rope_scaling=dict(
            beta_fast=32,
            beta_slow=1,
            factor=40,
            mscale=0.707,
            mscale_all_dim=0.707,
            original_max_position_embeddings=4096,
            type="yarn",
        ),
        rope_theta=10000,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        seq_aux=True,
        tie_word_embeddings=False,
        topk_group=1,
        topk_method="greedy",
        torch_dtype="bfloat16",
        use_cache=True,
        v_head_dim=128,
        vocab_size=102400,
    ),
}


def write_config(shape, root):
    d = os.path.join(root, shape)
    os.makedirs(d, exist_ok=True)
    with open(os.path.join(d, "config.json"), "w") as f:
        json.dump(SHAPES[shape], f, indent=1)
    return d


# name -> (prompts, output lengths)
def get(name):
    if name == "nano":
        return nano()
    if name == "b256x512x256":
        return fixed(256, 512, 256)
    if name == "prefill64x4096":
        return fixed(64, 4096, 1)
    if name == "bs1_128_256":
        return fixed(1, 128, 256)
    if name == "bs1_128_1":
        p, _ = fixed(1, 128, 256)
        return p, [1]
    if name == "warm":
        return fixed(32, 200, 20, seed=9)
    if name.startswith("cpu_"):
        return cpu()[name]
    raise KeyError(name)
