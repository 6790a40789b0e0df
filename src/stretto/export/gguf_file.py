"""A run's model as one GGUF file, which llama.cpp and the programs around it read.

The file is written with llama.cpp's own package (`gguf`): its names of tensors, its quantisation. What is ours is the
header, and for Llama the order of rows within heads, which llama.cpp wants interleaved. Weights go through memory one
by one. Families whose files transformers can read back are written, because that is how the file is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from stretto.errors import RecipeError
from stretto.export.gguf_tokenizer import GgufVocabulary, vocabulary_of
from stretto.export.merge import AUTO, Note, choose_dtype, settle, tell_base
from stretto.export.proof import ExportProof, RunAnswers, ask_run, prove, refuse_other_base, unexplained_share
from stretto.export.saved_model import SavedModel
from stretto.export.weights import TrainedWeights
from stretto.models.load import Policy
from stretto.storage.atomic import storing

Kind = gguf.GGMLQuantizationType
TYPES = {name: getattr(Kind, name.upper()) for name in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}
"""What weights are stored in: those that llama.cpp's package can write. The others need llama.cpp's own programs."""
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    **{name: getattr(gguf.LlamaFileType, f"MOSTLY_{name.upper()}") for name in TYPES if name != "f32"},
}
OF_DTYPE = {"float64": "f32", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
WHOLE = frozenset(OF_DTYPE.values())
"""Types that weights are rounded to one by one, which is quickly done again to compare."""
WIDE = frozenset({"token_embd.weight", "output.weight"})
"""Weights that suffer most from 4 or 5 bits; they get 8."""
FAMILIES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""`model_type` of a config.json -> what GGUF calls the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufExport:
    """What an export came to."""

    path: Path
    """The file."""
    kind: str
    """What its weights are stored in."""
    size: int
    """Bytes."""
    step: int
    """The step of the checkpoint."""
    proof: ExportProof
    """How it compares with the run."""

    def document(self) -> dict[str, Any]:
        """As a program reads it."""
        proof = self.proof.document()
        return {"file": str(self.path), "type": self.kind, "bytes": self.size, "step": self.step, "proof": proof}


def export(
    model: SavedModel,
    target: Path | None,
    *,
    kind: str,
    plain: bool = False,
    most: int,
    note: Note,
    make: Callable[[Any, str], GgufLayout] | None = None,
) -> GgufExport:
    """Writes the file once it is proved to be the run's model; nothing is kept of one that is not.

    `plain` is as for `merge`. `make` makes the layout, from configuration and type; a test can make a wrong one.
    """
    if target is not None:
        refuse_target(target)
    config = AutoConfig.from_pretrained(model.folder, trust_remote_code=False)
    refuse_family(config)
    tell_base(model, plain, note)
    policy = model.load("float32")
    weights = TrainedWeights(model, policy, plain)
    if kind == AUTO:
        kind = OF_DTYPE[choose_dtype(weights, AUTO, note)[0]]
    if target is None:  # named by the type, which may be the weights' own
        target = model.run / "gguf" / f"{model.checkpoint.name}-{kind}.gguf"
        refuse_target(target)
    draft = target.with_name(f".{target.stem}.partial.gguf")
    vocabulary = vocabulary_of(policy.tokenizer, size=config.vocab_size)
    run = ask_run(model, policy, most=most)
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            layout = (make or GgufLayout)(config, kind)
            write(draft, layout, weights, header=partial(write_header, model, policy, run, vocabulary))
            compared = layout.reading(draft)
            if kind in WHOLE:
                refuse_other_base(weights, layout.written(weights), *compared)
            unexplained = unexplained_share(policy, weights, *compared)
            del policy, weights
            proof = prove(run, draft, exact=kind == "f32" and not plain, unexplained=unexplained)
            settle(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    return GgufExport(path=target, kind=kind, size=target.stat().st_size, step=model.step, proof=proof)


def refuse_target(target: Path) -> None:
    """Refuses to write over a file, or one that programs would not take for a GGUF file."""
    if target.exists():
        raise RecipeError.of("--to", f"{target} exists already", "name another file, or remove it")
    if target.suffix != ".gguf":
        raise RecipeError.of("--to", f"{target} does not end in .gguf", "name the file MODEL.gguf")


def refuse_family(config: Any) -> None:
    """Refuses what could not be read back, or would be read as something else."""
    if config.model_type not in FAMILIES:
        reason = f"writing models of the family {config.model_type} as GGUF is not available yet"
        raise RecipeError.of("model.name", reason, f"use one of {', '.join(FAMILIES)}, or llama.cpp's own converter")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        reason = f"its positions ({rope['rope_type']} RoPE) in a GGUF file are not available yet"
        raise RecipeError.of("model.name", reason, "merge it, and use llama.cpp's own converter on the folder")
    if getattr(config, "use_sliding_window", False) or getattr(config, "sliding_window", None):
        raise RecipeError.of("model.name", "sliding windows in a GGUF file are not available yet", "use another model")


class GgufLayout:
    """Where each weight of a family goes in a file, in which order of rows and in which type."""

    def __init__(self, config: Any, kind: str) -> None:
        self.config, self.kind = config, kind
        self.family = FAMILIES[config.model_type]
        self.names = gguf.get_tensor_name_map(self.family, config.num_hidden_layers)

    def written(self, weights: TrainedWeights) -> list[str]:
        """The weights that a file holds. A head that is the embedding is not written twice; its absence says so."""
        tied = bool(self.config.tie_word_embeddings)
        return [name for name in weights.names if not (tied and name == "lm_head.weight")]

    def name(self, name: str) -> str:
        """What GGUF calls a weight."""
        found: str | None = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            reason = f"GGUF has no name for its weight {name}"
            raise RecipeError.of("model.name", reason, "merge it, and use llama.cpp's own converter on the folder")
        return found

    def type(self, name: str, shape: tuple[int, ...]) -> Any:
        """What a weight is stored in: norms and biases are small and stay whole, as llama.cpp has it."""
        wanted = TYPES[self.kind]
        if len(shape) < 2:
            return Kind.F32
        if wanted not in (Kind.F32, Kind.F16, Kind.BF16) and self.name(name) in WIDE:
            wanted = Kind.Q8_0
        block, _ = gguf.GGML_QUANT_SIZES[wanted]
        return wanted if shape[-1] % block == 0 else Kind.F16

    def stored(self, name: str, weight: Tensor) -> NDArray[Any]:
        """A weight as the file holds it."""
        rows = self._interleaved(name, weight.float()).contiguous().numpy()
        return np.ascontiguousarray(quantize(rows, self.type(name, tuple(weight.shape))))

    def reading(self, path: Path) -> tuple[Callable[[str], Tensor], Callable[[str, Tensor], Tensor]]:
        """A file's weights as numbers, and what numbers a weight should be in it."""
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

        def read(name: str) -> Tensor:
            tensor = tensors[self.name(name)]
            return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))

        def expected(name: str, weight: Tensor) -> Tensor:
            return torch.from_numpy(dequantize(self.stored(name, weight), self.type(name, tuple(weight.shape))))

        return read, expected

    def _interleaved(self, name: str, weight: Tensor) -> Tensor:
        """Llama's queries and keys with both halves of each head interleaved, which is how llama.cpp turns them."""
        which = next((part for part in ("q_proj", "k_proj") if f".{part}." in name), None)
        if self.family is not gguf.MODEL_ARCH.LLAMA or which is None:
            return weight
        heads = self.config.num_attention_heads if which == "q_proj" else self.config.num_key_value_heads
        halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, layout: GgufLayout, weights: TrainedWeights, *, header: Callable[..., None]) -> None:
    """The file: header, names and shapes, then one weight after the other."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[layout.family])
    try:
        header(writer, layout)
        names = layout.written(weights)
        for name in names:
            shape = weights.stored.shape(name)
            kind = layout.type(name, shape)
            whole = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind)
            stored = shape if whole else gguf.quant_shape_to_byte_shape(shape, kind)
            numbers = np.dtype(whole or np.uint8)
            size = int(np.prod(stored)) * numbers.itemsize
            writer.add_tensor_info(layout.name(name), stored, numbers, size, raw_dtype=None if whole else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            writer.write_tensor_data(layout.stored(name, weights.read(name)))
    finally:
        writer.close()


def write_header(
    model: SavedModel,
    policy: Policy,
    run: RunAnswers,
    vocabulary: GgufVocabulary,
    writer: gguf.GGUFWriter,
    layout: GgufLayout,
) -> None:
    """What the model is, its sizes, its tokenizer and chat template, and which token ends an answer."""
    config, tokenizer = layout.config, policy.tokenizer
    writer.add_name(f"{model.run.resolve().name} step {model.step}")
    writer.add_file_type(FILE_TYPES[layout.kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for add, value in (
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_key_length, head),
        (writer.add_value_length, head),
        (writer.add_rope_dimension_count, head),
        (writer.add_rope_freq_base, float(config.rope_parameters["rope_theta"])),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
    ):
        add(value)
    vocabulary.write(writer)
    for add, token in special_tokens(tokenizer, run, writer).items():
        add(token)
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and tokenizer.encode("a")[:1] == [bos])
    writer.add_add_eos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.get_chat_template())


def special_tokens(tokenizer: Any, run: RunAnswers, writer: gguf.GGUFWriter) -> Mapping[Callable[[int], None], int]:
    """Special tokens that the file has a place for. llama.cpp stops at two of them, its ends of a text and of a turn:
    they are those with which answers of the run end most often."""
    said = [int(answer.tokens[-1]) for answer in run.answers if answer.stop == "stop" and len(answer.tokens)]
    # Of those that are as frequent, the tokenizer's own goes first.
    ends = sorted(run.stop, key=lambda token: (-said.count(token), token != tokenizer.eos_token_id, token))
    usual, other = [*ends, None, None][:2]
    given = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: usual,
        writer.add_eot_token_id: other,
        writer.add_pad_token_id: tokenizer.pad_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id,
    }
    return {add: token for add, token in given.items() if token is not None}
