"""Lines with bands as an SVG picture: curves over seeds, or speed-ups over devices. A few hundred bytes of markup, made
without a library; what the numbers mean is for whoever hands them over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 56, 190, 36, 48
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d5aa8", "#c77f1a", "#3aa6a0", "#7a7a7a", "#a83e6b", "#4b5320", "#1f1f7a")

Curve = Sequence[tuple[float, float]]


def chart(
    title: str, across: str, up: str, lines: Mapping[str, Sequence[Curve]], *, top: float = 1.0, bottom: float = 0.0
) -> str:
    """A picture with one line per name, the mean over its curves, in a band from their least to their largest value.

    The curves of a name share their first coordinates; the second are between `bottom` and `top`.
    """
    span = top - bottom
    most = max(x for curves in lines.values() for curve in curves for x, _ in curve)

    def place(x: float, y: float) -> str:
        right = LEFT + x / most * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - bottom) / span * (HEIGHT - TOP - BOTTOM)
        return f"{right:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        (left, height), (right, _) = (place(x, bottom + share * span).split(",") for x in (0, most))
        parts.append(f'<line x1="{left}" y1="{height}" x2="{right}" y2="{height}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(height) + 4}" text-anchor="end">{bottom + share * span:g}</text>')
        at = place(most * share, bottom).split(",")[0]
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{most * share:,.0f}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">{escape(up)}</text>')
    for number, (name, curves) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        columns = list(zip(*curves, strict=True))
        xs = [sum(x for x, _ in column) / len(column) for column in columns]
        ys = [[y for _, y in column] for column in columns]
        band = [place(x, max(y)) for x, y in zip(xs, ys, strict=True)]
        band += reversed([place(x, min(y)) for x, y in zip(xs, ys, strict=True)])
        mean = [place(x, sum(y) / len(y)) for x, y in zip(xs, ys, strict=True)]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(mean)}" fill="none" stroke="{color}" stroke-width="2"/>')
        down = TOP + 8 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{down}" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 34}" y="{down + 7}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
