"""Names beside the points of a plane, where they cover nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

Box = tuple[float, float, float, float]  # left, right, low, high, in pixels
AWAY = (6, 14, 24, 38, 56)  # points from a point to its name


def place_names(
    axes: Any,
    points: dict[str, tuple[float, float]],
    lines: list[tuple[float, float, float]],
    draw: Callable[[str, tuple[float, float], str], Any],
) -> None:
    """Write each name beside its point, over no other name, no point, and none of the upright lines (x, low, high) if
    there is room. `draw` makes the text of a name at an offset from its point, with its side nearest to it."""
    figure = axes.figure
    figure.draw_without_rendering()  # so that axes have their place
    scale = figure.dpi / 72
    frame = axes.get_window_extent()
    spots = {name: axes.transData.transform(point) for name, point in points.items()}
    boxes = [(x - 5 * scale, x + 5 * scale, y - 5 * scale, y + 5 * scale) for x, y in spots.values()]
    for across, *ends in lines:
        (x, low), (_, high) = (axes.transData.transform((across, end)) for end in ends)
        boxes.append((x - scale, x + scale, low, high))
    for name in sorted(points, key=lambda name: (-points[name][1], points[name][0])):
        text = draw(name, (AWAY[0], 0), "left")
        extent = text.get_window_extent()
        wide, high = extent.width, extent.height
        x, y = spots[name]
        choices: list[tuple[float, int, tuple[float, float], str, Box]] = []
        for away, (across, up) in product(AWAY, ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1))):
            middle = (x + across * AWAY[0] * scale, y + up * away * scale)
            if not up:
                middle = (x + across * away * scale, y)
            left = middle[0] - (0 if across > 0 else wide if across < 0 else wide / 2)
            box = (left, left + wide, middle[1] - high / 2, middle[1] + high / 2)
            outside = box[0] < frame.x0 or box[1] > frame.x1 or box[2] < frame.y0 or box[3] > frame.y1
            hits = sum(overlap(box, other) for other in boxes) / (wide * high) + outside
            offset = ((middle[0] - x) / scale, (middle[1] - y) / scale)
            align = {1: "left", -1: "right", 0: "center"}[across]
            choices.append((round(hits, 2), len(choices), offset, align, box))
        _, _, offset, align, box = min(choices)
        text.remove()
        draw(name, offset, align)
        boxes.append(box)


def overlap(one: Box, two: Box) -> float:
    """The area that two boxes share."""
    wide = min(one[1], two[1]) - max(one[0], two[0])
    high = min(one[3], two[3]) - max(one[2], two[2])
    return max(0.0, wide) * max(0.0, high)
