"""How large an expression becomes when it is computed, estimated before anything is computed.

A model's answer can be short and cost everything: a tower of powers, a factorial of a factorial, a product of 10^8
factors, a bracket to the 200th. Each function here takes the sizes of the parts and gives the size of the whole, from
above, and raises `TooLargeError` where that passes a limit. `tree` walks expressions with them. It is an estimate:
what it lets through can still be slow, and then the limits of the worker process end it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

MAX_BITS = 50_000
"""Binary digits of a number: 4000! has fewer, 2^(10^8) more."""
MAX_TERMS = 1000
"""Terms of a sum after multiplying out: (x+1)^500 has fewer, (x+y+z+1)^200 more."""
MAX_DEGREE = 5000
"""Power of a letter or function in a polynomial; some algorithms make a list as long as that."""
MAX_STEPS = 10_000
"""Terms or factors of a sum or product that is written with limits."""
MAX_ORDER = 50
"""How often something may be differentiated."""
MAX_NODES = 2000
"""Numbers, letters and operations of an expression."""
HUGE = 64.0
"""Powers of two from here on are all the same to us."""


class TooLargeError(Exception):
    """Computing the expression would cost more than any answer is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What an expression comes to, at most."""

    bits: float = 0.0
    """Binary digits that its numbers have, numerators and denominators together."""
    magnitude: float = 0.0
    """Logarithm to base 2 of its absolute value, if it is a number."""
    terms: float = 1.0
    """Terms that it has when it is multiplied out."""
    degrees: Mapping[str, float] = field(default_factory=dict)
    """Letter or function -> its power when multiplied out. Empty for a number."""
    integer: bool = False
    """True if it is known to be an integer."""
    negative: bool = True
    """False if it is known to be no less than 0."""

    @property
    def constant(self) -> bool:
        """True for a number, also one that is still to be computed."""
        return not self.degrees

    @property
    def absolute(self) -> float:
        """The largest absolute value of a number, cut off where it no longer matters."""
        return math.exp2(min(max(self.magnitude, -HUGE), HUGE))


def number(value: int | float, denominator: int = 1) -> Size:
    """A number as it stands there: an integer, a fraction or a float."""
    if isinstance(value, float):
        magnitude = math.log2(abs(value)) if value and math.isfinite(value) else HUGE if value else 0.0
        return checked(Size(bits=HUGE, magnitude=magnitude, negative=value < 0))
    bits = abs(value).bit_length()
    return checked(
        Size(
            bits=bits + (denominator.bit_length() if denominator != 1 else 0),
            magnitude=_log2(abs(value)) - _log2(denominator),
            integer=denominator == 1,
            negative=value < 0,
        )
    )


def irrational(value: float) -> Size:
    """pi, e and their like."""
    return Size(bits=2.0, magnitude=math.log2(value), negative=False)


def letter(name: str) -> Size:
    """A variable, or anything else that stays as it is."""
    return Size(degrees={name: 1.0})


def total(sizes: Sequence[Size]) -> Size:
    """The sum of them. Integers grow by a carry, fractions by each other's denominators."""
    if not sizes:
        return number(0)
    integer = all(size.integer for size in sizes)
    bits = [size.bits for size in sizes]
    return checked(
        Size(
            bits=max(bits) + math.log2(len(sizes)) if integer else sum(bits),
            magnitude=max(size.magnitude for size in sizes) + math.log2(len(sizes)),
            terms=sum(size.terms for size in sizes),
            degrees=_merged(sizes, add=False),
            integer=integer,
            negative=any(size.negative for size in sizes),
        )
    )


def product(sizes: Sequence[Size]) -> Size:
    """The product of them, multiplied out."""
    degrees = _merged(sizes, add=True)
    return checked(
        Size(
            bits=sum(size.bits for size in sizes),
            magnitude=sum(size.magnitude for size in sizes),
            terms=min(math.prod(size.terms for size in sizes), _monomials(degrees)),
            degrees=degrees,
            integer=all(size.integer for size in sizes),
            negative=any(size.negative for size in sizes),
        )
    )


def negated(size: Size) -> Size:
    """The same with the other sign."""
    return replace(size, negative=True)


def power(base: Size, exponent: Size, name: str = "power") -> Size:
    """`base` to the `exponent`; `name` tells this power from others where the exponent holds a letter."""
    if not exponent.constant:
        return checked(Size(bits=base.bits + exponent.bits, degrees={name: 1.0}))
    times = max(1.0, exponent.absolute)
    bits, whole = base.bits * times, exponent.integer and not exponent.negative
    if base.constant:
        known = whole or (not exponent.negative and base.magnitude >= 0)
        return checked(
            Size(
                bits=bits,
                magnitude=max(base.magnitude, 0.0) * times if known else bits,
                integer=base.integer and whole,
                negative=base.negative,
            )
        )
    degrees = {name: degree * times for name, degree in base.degrees.items()}
    return checked(Size(bits=bits, terms=min(_expanded(base.terms, times), _monomials(degrees)), degrees=degrees))


def exponential(exponent: Size, name: str = "exp") -> Size:
    """e to the `exponent`."""
    return power(irrational(math.e), exponent, name)


def factorial(size: Size, name: str = "factorial") -> Size:
    """1 * 2 * ... up to a number, or a function of a letter."""
    if not size.constant:
        return applied([size], name)
    bits = size.absolute * max(1.0, size.magnitude)
    return checked(Size(bits=bits, magnitude=bits, integer=True, negative=size.negative))


def binomial(top: Size, bottom: Size, name: str = "binomial") -> Size:
    """How many ways there are to choose; neither 2^n nor n^k is passed."""
    if not (top.constant and bottom.constant):
        return applied([top, bottom], name)
    bits = min(top.absolute, bottom.absolute * max(1.0, top.magnitude))
    return checked(Size(bits=bits, magnitude=bits, integer=True))


def applied(sizes: Sequence[Size], name: str, *, integer: bool = False) -> Size:
    """A function that is no larger than what it is of; `name` tells it from others."""
    bits = sum(size.bits for size in sizes)
    if all(size.constant for size in sizes):
        magnitude = max((size.magnitude for size in sizes), default=0.0)
        return checked(Size(bits=max(bits, HUGE), magnitude=max(magnitude, 0.0), integer=integer))
    return checked(Size(bits=bits, degrees={name: 1.0}))


def repeated(body: Size, steps: float, *, multiplied: bool) -> Size:
    """A sum or product of so many terms like `body`."""
    if steps > MAX_STEPS:
        raise TooLargeError(f"{steps:g} terms to add or multiply")
    count = max(1, math.ceil(steps))
    return product([body] * count) if multiplied else total([body] * count)


def checked(size: Size) -> Size:
    """The size, if it is within the limits."""
    if size.bits > MAX_BITS:
        raise TooLargeError(f"numbers of about {size.bits:.3g} binary digits")
    if size.terms > MAX_TERMS:
        raise TooLargeError(f"about {size.terms:.3g} terms after multiplying out")
    if max(size.degrees.values(), default=0.0) > MAX_DEGREE:
        raise TooLargeError(f"a power of {max(size.degrees.values()):.3g}")
    return size


def _log2(value: int) -> float:
    return math.log2(value) if value else 0.0


def _merged(sizes: Sequence[Size], *, add: bool) -> dict[str, float]:
    """The degrees of a product (they add up) or of a sum (the largest stays)."""
    degrees: dict[str, float] = {}
    for size in sizes:
        for name, degree in size.degrees.items():
            before = degrees.get(name, 0.0)
            degrees[name] = before + degree if add else max(before, degree)
    return degrees


def _monomials(degrees: Mapping[str, float]) -> float:
    """How many different products of powers there can be."""
    return math.prod(degree + 1 for degree in degrees.values())


def _expanded(terms: float, times: float) -> float:
    """Terms of a sum to a power: so many ways to draw `times` of `terms` with repetition."""
    if terms <= 1 or times <= 1:
        return terms
    logarithm = math.lgamma(times + terms) - math.lgamma(times + 1) - math.lgamma(terms)
    return math.exp(min(logarithm, HUGE))
