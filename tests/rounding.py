"""How far two ways to compute the same number may lie apart: from the arithmetic, never from one machine's result.

Processors add in different orders, with fused products or without, so every bound on rounded numbers must hold for all
of them. Each operation errs by half a unit of the last place; errors of a sum grow with the square root of its length,
as those of a random walk do, and so do those of sums that feed one another (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019). What is claimed to be exact is tested in fp64 instead.
"""

import math

import torch

MARGIN = 10.0
"""Of a bound over the typical error: the worst of many tensors, and weights that enlarge what comes in."""


def rounding(dtype, *lengths):
    """Of a number, relative to its size, that went through sums of these lengths, one after the other; 1 is a rounding
    without a sum."""
    return MARGIN * torch.finfo(dtype).eps * math.sqrt(sum(lengths))


def forward_sums(config, tokens):
    """The lengths of the sums from a token to its logits, in a decoder that sees so many tokens."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # two norms; queries, scores, their softmax, values; the way out; both halves of the feed-forward
    layer = [config.hidden_size] * 2 + [config.hidden_size, head, tokens, tokens, head * config.num_attention_heads]
    return [*layer, config.hidden_size, inner] * config.num_hidden_layers + [config.hidden_size] * 2


def backward_sums(config, tokens):
    """The same up to the gradient of a weight: there, softmax over the vocabulary, back, and a sum over all tokens."""
    return [*forward_sums(config, tokens) * 2, config.vocab_size, tokens]


def longest(samples):
    """Tokens of the longest conversation, which is the most that one of them attends to."""
    return max(len(sample.conversation.tokens) for sample in samples)
