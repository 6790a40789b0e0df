"""Triton kernels for what layers do between their matrix products; imported where there is a GPU, and Triton.

Each reads its inputs once, keeps intermediate numbers in registers and rounds where the stock layers round. Rows are
programs: a row of a norm, of a head's logits, or some blocks of a parameter.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels import bits

FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(bits.FIRST_FACTOR), tl.constexpr(bits.SECOND_FACTOR)


def launch(kernel, programs, first, *arguments, **sizes):
    """Starts a kernel where its first tensor is, which need not be the card that this thread uses."""
    with torch.cuda.device_of(first):
        kernel[programs](first, *arguments, **sizes)


@triton.jit
def norm_forward(states, weight, out, rates, width, eps, BLOCK: tl.constexpr):
    """A row over its root mean square, times the weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(states + row * width + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    rate = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normal = (wide * rate).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (factor * normal).to(values.dtype), mask=inside)
    tl.store(rates + row, rate)


@triton.jit
def norm_backward(
    states, weight, rates, outgoing, result, sums, rows, width, each, BLOCK: tl.constexpr, TRAINS: tl.constexpr
):
    """Gradients of some rows, and what they add to the weight's."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * each, tl.minimum((program + 1) * each, rows)):
        place = row * width + columns
        rate = tl.load(rates + row)
        normal = tl.load(states + place, mask=inside, other=0.0).to(tl.float32) * rate
        slope = tl.load(outgoing + place, mask=inside, other=0.0).to(tl.float32)
        if TRAINS:
            total += slope * normal
        slope *= factor
        along = tl.sum(slope * normal, 0) / width
        tl.store(result + place, ((slope - normal * along) * rate).to(result.dtype.element_ty), mask=inside)
    if TRAINS:
        tl.store(sums + program * width + columns, total, mask=inside)


@triton.jit
def gated_forward(gate, up, out, count, BLOCK: tl.constexpr):
    """silu(gate) * up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gates = tl.load(gate + place, mask=inside, other=0.0)
    wide = gates.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gates.dtype).to(tl.float32)
    ups = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (silu * ups).to(gates.dtype), mask=inside)


@triton.jit
def gated_backward(gate, up, outgoing, gate_gradient, up_gradient, count, BLOCK: tl.constexpr):
    """Gradients of both factors; the slope of silu is sigmoid + silu * (1 - sigmoid)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gates = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(outgoing + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gates)
    silu = gates * share
    kind = gate_gradient.dtype.element_ty
    tl.store(up_gradient + place, (slope * silu).to(kind), mask=inside)
    tl.store(gate_gradient + place, (slope * ups * (share + silu * (1 - share))).to(kind), mask=inside)


@triton.jit
def logprobs_forward(raw, targets, logprobs, normalisers, entropies, vocabulary, temperature, BLOCK: tl.constexpr):
    """Of a row of logits: log-probability of one token, the normaliser, the entropy. Largest and sums in one pass."""
    row = tl.program_id(0).to(tl.int64)
    top, total, mixed = -1e30, 0.0, 0.0  # minus infinity times 0 would be no number
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        logits = tl.load(raw + row * vocabulary + columns, mask=inside, other=0.0).to(tl.float32) / temperature
        logits = tl.where(inside, logits, -1e30)
        higher = tl.maximum(top, tl.max(logits, 0))
        shares = tl.exp(logits - higher)
        fade = tl.exp(top - higher)
        mixed = fade * (mixed + (top - higher) * total) + tl.sum(shares * tl.where(inside, logits - higher, 0.0), 0)
        total = fade * total + tl.sum(shares, 0)
        top = higher
    chosen = tl.load(raw + row * vocabulary + tl.load(targets + row)).to(tl.float32) / temperature
    logs = tl.log(total)
    tl.store(logprobs + row, chosen - top - logs)
    tl.store(normalisers + row, top + logs)
    tl.store(entropies + row, logs - mixed / total)


@triton.jit
def logprobs_backward(raw, targets, normalisers, outgoing, vocabulary, temperature, BLOCK: tl.constexpr):
    """Logits become their gradient, in place."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = columns < vocabulary, raw + row * vocabulary + columns
    logits = tl.load(place, mask=inside, other=0.0).to(tl.float32) / temperature
    slope = tl.load(outgoing + row)
    shares = tl.exp(logits - tl.load(normalisers + row))
    chosen = tl.where(columns == tl.load(targets + row), slope, 0.0)
    tl.store(place, ((chosen - slope * shares) / temperature).to(raw.dtype.element_ty), mask=inside)


@triton.jit
def noises(places, seed):
    """Two numbers from 0 to 1 for each place in a parameter."""
    mixed = (places * FIRST_FACTOR) ^ seed
    mixed = (mixed ^ (mixed >> 29)) * SECOND_FACTOR
    mixed = mixed ^ (mixed >> 32)
    return (mixed & 0xFFFFFF).to(tl.float32) / 16777216, ((mixed >> 24) & 0xFFFFFF).to(tl.float32) / 16777216


@triton.jit
def cut(wide, noise):
    """bf16, rounded up or down by its noise."""
    bits = wide.to(tl.int32, bitcast=True) + tl.minimum((noise * 65536).to(tl.int32), 65535)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrow_update(
    weight, rest, gradient, first, first_scales, second, second_scales, blocks, size, count, base, seed,
    kept, fresh1, beta2, fresh2, pace, root_bias2, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """AdamW of some blocks whose moments are stored in 16 or 8 bits, as `training.narrow_adamw` does it."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    place = block[:, None] * size + column[None, :]
    inside = (column < size)[None, :] & (place < count)
    own = tl.load(weight + place, mask=inside, other=0.0)
    if NARROW:
        high = own.to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = tl.load(rest + place, mask=inside, other=0).to(tl.int32)
        master = (high + low).to(tl.float32, bitcast=True)
    else:
        master = own
    slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    mean, square = tl.load(first + place, mask=inside, other=0), tl.load(second + place, mask=inside, other=0)
    if QUARTER:
        share = mean.to(tl.float32) / 127
        mean = share * tl.abs(share) * tl.load(first_scales + block, mask=block < blocks, other=0.0)[:, None]
        share = square.to(tl.float32) / 255
        square = share * share
        square = square * square * tl.load(second_scales + block, mask=block < blocks, other=0.0)[:, None]
    else:
        mean, square = mean.to(tl.float32), square.to(tl.float32)
    master *= kept
    mean += fresh1 * (slope - mean)
    square = beta2 * square + fresh2 * slope * slope
    master -= pace * mean / (tl.sqrt(square) / root_bias2 + eps)
    one, other = noises(base + place, seed)
    if QUARTER:
        most = tl.max(tl.where(inside, tl.abs(mean), 0.0), 1)
        tl.store(first_scales + block, most, mask=block < blocks)
        share = mean / tl.where(most > 0, most, 1.0)[:, None]
        root = tl.sqrt(tl.abs(share)) * 127
        low = tl.floor(root)
        chance = (root - low) * (root + low) / (2 * low + 1)
        codes = low + tl.where(one < chance, 1.0, 0.0)
        codes = tl.where(share < 0, -codes, codes)
        tl.store(first + place, tl.clamp(codes, -127.0, 127.0).to(tl.int8), mask=inside)
        most = tl.max(tl.where(inside, square, 0.0), 1)
        tl.store(second_scales + block, most, mask=block < blocks)
        root = tl.sqrt(tl.sqrt(square / tl.where(most > 0, most, 1.0)[:, None])) * 255
        low = tl.floor(root)
        chance = (root - low) * (root + low) / (2 * low + 1)
        chance *= (root * root + low * low) / (2 * (low * low + low) + 1)
        codes = low + tl.where(other < chance, 1.0, 0.0)
        codes = tl.where(square > 0, tl.maximum(codes, 1.0), codes)
        tl.store(second + place, tl.clamp(codes, 0.0, 255.0).to(tl.uint8), mask=inside)
    else:
        tl.store(first + place, cut(mean, one), mask=inside)
        tl.store(second + place, cut(square, other), mask=inside)
    if NARROW:
        bits = master.to(tl.int32, bitcast=True)
        upper = (bits + 32767 + ((bits >> 16) & 1)) >> 16  # to the nearest, as a cast does
        tl.store(weight + place, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(rest + place, tl.minimum(bits - (upper << 16), 32767).to(tl.int16), mask=inside)
    else:
        tl.store(weight + place, master, mask=inside)
