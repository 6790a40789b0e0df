"""Shapes of well-known models, as their published configurations state them; a list of facts, offline.

A name that has several spellings stands here once per spelling. `shapes` says what the numbers mean.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.planner.cost.shapes import ModelShape


def _dense(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int,
    tied: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        vocab=vocab, tied=tied,
    )  # fmt: skip


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    shape = _dense(name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50272, True)
    return replace(shape, gated=False)


def _mixture(
    shape: ModelShape, experts: int, top_k: int, expert_ffn: int, shared: int = 0, dense: int = 0
) -> ModelShape:
    return replace(
        shape, experts=experts, top_k=top_k, expert_ffn=expert_ffn, shared_experts=shared, dense_layers=dense
    )


def _latent(shape: ModelShape, q_rank: int) -> ModelShape:
    """DeepSeek's latent attention: rank 512 for keys and values, 64 for positions."""
    return replace(shape, kv_rank=512, q_rank=q_rank, rope_dim=64, value_dim=128)


def _windowed(shape: ModelShape, windowed: int, window: int) -> ModelShape:
    return replace(shape, windowed_layers=windowed, window=window)


_QWEN, _QWEN_LARGE, _LLAMA3, _GLM = 151936, 152064, 128256, 151552

_SHAPES = (
    _dense("llama-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    _dense("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000),
    _dense("llama-33b", 60, 6656, 52, 52, 128, 17920, 32000),
    _dense("llama-65b", 80, 8192, 64, 64, 128, 22016, 32000),
    _dense("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    _dense("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
    _dense("llama2-34b", 48, 8192, 64, 8, 128, 22016, 32000),
    _dense("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    _dense("llama3-8b", 32, 4096, 32, 8, 128, 14336, _LLAMA3),
    _dense("llama3-70b", 80, 8192, 64, 8, 128, 28672, _LLAMA3),
    _dense("llama3-405b", 126, 16384, 128, 8, 128, 53248, _LLAMA3),
    _dense("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, _LLAMA3, True),
    _dense("llama3.2-3b", 28, 3072, 24, 8, 128, 8192, _LLAMA3, True),
    _dense("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
    _dense("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, _QWEN, True),
    _dense("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, _QWEN, True),
    _dense("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, _QWEN, True),
    _dense("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, _QWEN_LARGE),
    _dense("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, _QWEN_LARGE),
    _dense("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, _QWEN_LARGE),
    _dense("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, _QWEN_LARGE),
    _dense("deepseek-r1-distill-qwen-1.5b", 28, 1536, 12, 2, 128, 8960, _QWEN),
    _dense("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, _QWEN, True),
    _dense("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, _QWEN, True),
    _dense("qwen3-4b", 36, 2560, 32, 8, 128, 9728, _QWEN, True),
    _dense("qwen3-8b", 36, 4096, 32, 8, 128, 12288, _QWEN),
    _dense("qwen3-14b", 40, 5120, 40, 8, 128, 17408, _QWEN),
    _dense("qwen3-32b", 64, 5120, 64, 8, 128, 25600, _QWEN),
    _mixture(_dense("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, _QWEN), 128, 8, 768),
    _mixture(_dense("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, _QWEN), 128, 8, 1536),
    _mixture(_dense("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000), 8, 2, 14336),
    _mixture(_dense("mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768), 8, 2, 16384),
    _mixture(_dense("glm-4.5-355b-a32b", 92, 5120, 96, 8, 128, 12288, _GLM), 160, 8, 1536, 1, 3),
    _mixture(_dense("glm-4.5-air-106b-a12b", 46, 4096, 96, 8, 128, 10944, _GLM), 128, 8, 1408, 1, 1),
    _latent(_mixture(_dense("deepseek-v3-671b", 61, 7168, 128, 128, 128, 18432, 129280), 256, 8, 2048, 1, 3), 1536),
    _latent(_mixture(_dense("deepseek-v2-lite-16b", 27, 2048, 16, 16, 128, 10944, 102400), 64, 6, 1408, 2, 1), 0),
    _latent(_mixture(_dense("moonlight-16b-a3b", 27, 2048, 16, 16, 128, 11264, 163840), 64, 6, 1408, 2, 1), 0),
    _latent(_mixture(_dense("kimi-k2-1t", 61, 7168, 64, 64, 128, 18432, 163840), 384, 8, 2048, 1, 1), 1536),
    _windowed(_mixture(_dense("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088), 32, 4, 2880), 12, 128),
    _windowed(_mixture(_dense("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088), 128, 4, 2880), 18, 128),
    _dense("gemma-2b", 18, 2048, 8, 1, 256, 16384, 256000, True),
    _dense("gemma-7b", 28, 3072, 16, 16, 256, 24576, 256000, True),
    _windowed(_dense("gemma2-2b", 26, 2304, 8, 4, 256, 9216, 256000, True), 13, 4096),
    _windowed(_dense("gemma2-9b", 42, 3584, 16, 8, 256, 14336, 256000, True), 21, 4096),
    _windowed(_dense("gemma2-27b", 46, 4608, 32, 16, 128, 36864, 256000, True), 23, 4096),
    _windowed(_dense("gemma3-1b", 26, 1152, 4, 1, 256, 6912, 262144, True), 22, 512),
    _windowed(_dense("gemma3-4b", 34, 2560, 8, 4, 256, 10240, 262208, True), 29, 1024),
    _windowed(_dense("gemma3-12b", 48, 3840, 16, 8, 256, 15360, 262208, True), 40, 1024),
    _windowed(_dense("gemma3-27b", 62, 5376, 32, 16, 128, 21504, 262208, True), 52, 1024),
    _dense("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, True),
    _dense("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49152, True),
    _dense("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, True),
    _dense("phi-4", 40, 5120, 40, 10, 128, 17920, 100352),
    _opt("opt-350m", 24, 1024, 16),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
)

_ALIASES = {
    "llama-30b": "llama-33b",
    "meta-llama-3-8b": "llama3-8b",
    "meta-llama-3-70b": "llama3-70b",
    "llama-2-7b": "llama2-7b",
    "llama-2-13b": "llama2-13b",
    "llama-2-70b": "llama2-70b",
    "codellama-34b": "llama2-34b",
    **{f"{name}-{size}": f"llama3-{size}" for name in ("llama3.1", "llama-3.1") for size in ("8b", "70b", "405b")},
    "llama3.3-70b": "llama3-70b",
    "llama-3.3-70b": "llama3-70b",
    **{f"llama-3.2-{size}": f"llama3.2-{size}" for size in ("1b", "3b")},
    **{f"qwen2.5-math-{size}": f"qwen2.5-{size}" for size in ("1.5b", "7b", "72b")},
    **{f"qwen2.5-coder-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "14b", "32b")},
    "deepseek-r1-distill-llama-8b": "llama3-8b",
    "deepseek-r1-distill-llama-70b": "llama3-70b",
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "deepseek-v3-671b-a37b"), "deepseek-v3-671b"),
    "deepseek-v2-lite": "deepseek-v2-lite-16b",
    "kimi-k2": "kimi-k2-1t",
    "kimi-k2-1t-a32b": "kimi-k2-1t",
    "moonlight": "moonlight-16b-a3b",
    "glm-4.5": "glm-4.5-355b-a32b",
    "glm-4.5-air": "glm-4.5-air-106b-a12b",
    "intellect-3-106b-a12b": "glm-4.5-air-106b-a12b",
    **{
        f"gemma-{n}-{size}": f"gemma{n}-{size}" for n, size in ((2, "2b"), (2, "9b"), (2, "27b"), (3, "4b"), (3, "27b"))
    },
}
"""Other spellings, and models that are trained from another's shape."""

_CUT = ("llama", "mistral", "mixtral", "qwen", "smollm2", "deepseek-r1", "deepseek-v3")
"""How the names of models begin that were tried cut, if in small."""

_WIDE = ("gpt-oss",)
"""How the names of models begin most of whose weights cannot be stored in few bits."""

FAMILIES: dict[str, ModelShape] = {
    shape.name: replace(shape, uncut=not shape.name.startswith(_CUT), narrows=not shape.name.startswith(_WIDE))
    for shape in _SHAPES
}
FAMILIES |= {alias: FAMILIES[name] for alias, name in _ALIASES.items()}
"""Name -> shape."""
