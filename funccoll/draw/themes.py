"""Themes: the colours of drawings on light and on dark pages, by role, and their contrast.

A scene names colours by role, so one scene is rendered in any theme. Roles are "surface", "ink", "muted", "grid", "band" and
"accent". "c3" is the fourth colour of the palette, "r0.25" a quarter along the ramp, and "s0.5" half way from the band to the
accent. "tX" is a tint of any of them, on which text is written.

Sources: Okabe and Ito, "Color Universal Design", 2008 (the palette); Smith and van der Walt, viridis, 2015 (the ramp);
Ottosson, OKLab, 2020 (shades); WCAG 2.2, success criterion 1.4.3 (contrast).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache

from .. import config
from ..errors import DrawingError

__all__ = ["LEAST_CONTRAST", "PALETTE", "THEMES", "Theme", "contrast", "find_theme", "series"]

LEAST_CONTRAST = 4.5
"""The contrast of text that WCAG's level AA requires."""

_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, _YELLOW = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
)
PALETTE = 8
"""Colours that differ in hue. If more are needed, they come from the ramp."""
_VIRIDIS = (
    "#440154",
    "#482475",
    "#414487",
    "#355f8d",
    "#2a788e",
    "#21918c",
    "#22a884",
    "#44bf70",
    "#7ad151",
    "#bddf26",
    "#fde725",
)


@dataclass(frozen=True)
class Theme:
    """The colours of one theme. `ramp` is the part of viridis that shows on its page."""

    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    band: str
    accent: str
    palette: tuple[str, ...]
    ramp: tuple[float, float]

    def colour(self, role: str) -> str:
        """Return the colour of a role, as "#rrggbb"."""
        return _colour(self, role)

    def text_on(self, role: str) -> str:
        """Return the colour of text on a colour: black or white. One of them always has the contrast that text needs."""
        fill = self.colour(role)
        return max(("#000000", "#ffffff"), key=lambda c: contrast(c, fill))


THEMES = {
    t.name: t
    for t in (
        Theme(
            "light",
            "#ffffff",
            "#1f2328",
            "#57606a",
            "#d8dee4",
            "#f3f5f7",
            _BLUE,
            (_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, "#1f2328", "#b5a800"),
            (0.0, 0.86),
        ),
        Theme(
            "dark",
            "#14181d",
            "#e8ecf0",
            "#a3adb8",
            "#363e47",
            "#1e242b",
            _SKY,
            (_SKY, _ORANGE, _GREEN, _PURPLE, _YELLOW, _VERMILLION, "#e8ecf0", "#4a90d9"),
            (0.16, 1.0),
        ),
    )
}
"""The themes by name.

Yellow on a light page is darkened, and blue on a dark one lightened. Otherwise both would hardly show.
"""


def find_theme(name: str | None = None) -> Theme:
    """Return the theme of a name. None stands for FUNCCOLL_THEME, and that for "light". Raises DrawingError."""
    where = "theme" if name is not None else config.THEME
    chosen = name if name is not None else config.THEME.read()
    if not isinstance(chosen, str) or chosen not in THEMES:
        close = difflib.get_close_matches(str(chosen), THEMES, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise DrawingError(f"unknown {where}={chosen!r}.{meant} There are: {', '.join(THEMES)}.")
    return THEMES[chosen]


def series(i: int, n: int) -> str:
    """Return the role of the i-th of n things: a colour of the palette, or, for more things, a place on the ramp."""
    return f"c{i % PALETTE}" if n <= PALETTE else f"r{i / (n - 1):.3f}"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours after WCAG, from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@lru_cache(maxsize=4096)
def _colour(theme: Theme, role: str) -> str:
    kind, rest = role[:1], role[1:]
    if role in ("surface", "ink", "muted", "grid", "band", "accent"):
        return getattr(theme, role)
    if kind == "t":
        return _blend(theme.surface, theme.colour(rest), 0.45)
    if kind == "s":
        return _blend(theme.band, theme.accent, float(rest))
    if kind == "c":
        return theme.palette[int(rest)]
    if kind == "r":
        low, high = theme.ramp
        at = (low + (high - low) * float(rest)) * (len(_VIRIDIS) - 1)
        i = min(int(at), len(_VIRIDIS) - 2)
        return _blend(_VIRIDIS[i], _VIRIDIS[i + 1], at - i)
    raise DrawingError(f"unknown colour {role!r} in a scene.")


def _linear(colour: str) -> list[float]:
    """Return red, green and blue from 0 to 1, proportional to light."""
    values = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


_TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_FROM_CONES = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)


def _blend(one: str, other: str, part: float) -> str:
    """Return a colour between two.

    OKLab is linear in the cube roots of the cones' responses. So a blend is linear there.
    """
    cones = [[sum(w * v for w, v in zip(row, _linear(c), strict=True)) ** (1 / 3) for row in _TO_CONES] for c in (one, other)]
    mixed = [(a + (b - a) * part) ** 3 for a, b in zip(*cones, strict=True)]
    out = []
    for row in _FROM_CONES:
        v = min(1.0, max(0.0, sum(w * m for w, m in zip(row, mixed, strict=True))))
        out.append(round(255 * (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055)))
    return "#{:02x}{:02x}{:02x}".format(*out)
