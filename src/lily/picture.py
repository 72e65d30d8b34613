"""The dispatch graph as a picture: stages from left to right, dispatches in them, what waits for what. Plain SVG, no library."""

from __future__ import annotations

from html import escape
from typing import Any

_COLOURS = {
    "gemv": "#4c78a8", "gemm": "#4c78a8", "gate": "#4c78a8", "moe": "#f58518", "gdn": "#54a24b", "conv": "#54a24b", "gated": "#54a24b",
    "attn": "#b279a2", "head": "#b279a2", "rope": "#b279a2", "kv": "#b279a2", "sample": "#e45756", "score": "#e45756",
}  # fmt: skip
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 176, 46, 26, 12, 44


def draw(dispatches: list[dict[str, Any]], title: str, prefixes: tuple[str, ...] = ()) -> str:
    """SVG of the dispatches whose label starts with one of `prefixes` (all when empty).

    `dispatches` is a list of `lily.plan`: `kernel`, `label`, `stage`, `bytes_read`, `bytes_written` and `after`, the
    indices of those it waits for. A column is a stage; a barrier stands between two columns.
    """
    chosen = [i for i, d in enumerate(dispatches) if not prefixes or d["label"].startswith(prefixes)]
    if not chosen:
        raise ValueError(f"no dispatch has a label that starts with {' or '.join(prefixes) or 'anything'}")
    stages = sorted({dispatches[i]["stage"] for i in chosen})
    column = {stage: n for n, stage in enumerate(stages)}
    place: dict[int, tuple[int, int]] = {}
    filled = [0] * len(stages)
    for i in chosen:
        n = column[dispatches[i]["stage"]]
        place[i] = (_MARGIN + n * (_BOX_WIDTH + _GAP_X), _MARGIN + 34 + filled[n] * (_BOX_HEIGHT + _GAP_Y))
        filled[n] += 1
    width = 2 * _MARGIN + len(stages) * (_BOX_WIDTH + _GAP_X) - _GAP_X
    height = _MARGIN + 34 + max(filled) * (_BOX_HEIGHT + _GAP_Y) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="26" font-size="15" font-weight="600" fill="#222222">{escape(title)}</text>',
    ]
    for stage, n in column.items():
        x = _MARGIN + n * (_BOX_WIDTH + _GAP_X)
        lines.append(f'<text x="{x}" y="{_MARGIN + 22}" fill="#666666">stage {stage}</text>')
        if n:
            at = x - _GAP_X / 2
            lines.append(f'<line x1="{at}" y1="{_MARGIN + 12}" x2="{at}" y2="{height - 22}" stroke="#bbbbbb" stroke-dasharray="4 3"/>')
    for i in chosen:
        x, y = place[i]
        for before in dispatches[i]["after"]:
            if before in place:
                x0, y0 = place[before][0] + _BOX_WIDTH, place[before][1] + _BOX_HEIGHT / 2
                y1 = y + _BOX_HEIGHT / 2
                bend = (x0 + x) / 2
                lines.append(f'<path d="M{x0},{y0} C{bend},{y0} {bend},{y1} {x},{y1}" fill="none" stroke="#888888" stroke-width="1.2"/>')
    for i in chosen:
        lines += _box(dispatches[i], *place[i])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(dispatch: dict[str, Any], x: int, y: int) -> list[str]:
    colour = _COLOURS.get(dispatch["kernel"].split("_")[0], "#9d9da1")
    moved = dispatch["bytes_read"] + dispatch["bytes_written"]
    return [
        f'<rect x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5" fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>',
        f'<text x="{x + 8}" y="{y + 15}" font-weight="600" fill="#222222">{escape(dispatch["kernel"])}</text>',
        f'<text x="{x + 8}" y="{y + 28}" fill="#444444" font-size="9.5">{escape(_short(dispatch["label"]))}</text>',
        f'<text x="{x + 8}" y="{y + 40}" fill="#777777" font-size="9.5">{_size(moved)}</text>',
    ]


def _short(label: str) -> str:
    return label if len(label) <= 31 else "…" + label[-30:]


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"
