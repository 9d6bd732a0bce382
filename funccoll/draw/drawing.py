"""A drawing: a scene with a theme. matplotlib saves it, and plotly shows it in notebooks."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DrawingError, MissingPackageError
from .scene import Scene
from .themes import Theme, find_theme

__all__ = ["Drawing"]

_COLOURS, _PIXELS = 48, 880
"""Colours and width of the image in a notebook. The file is a quarter as large as without, and looks alike."""


def _svg(scene: Scene, theme: Theme) -> bytes:
    from .static_figure import svg_text

    return svg_text(scene, theme).encode()


def _png(scene: Scene, theme: Theme) -> bytes:
    from .static_figure import png_bytes

    return png_bytes(scene, theme)


_FORMATS: dict[str, Callable[[Scene, Theme], bytes]] = {".svg": _svg, ".png": _png}


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """A drawing of an object. The functions of `fc.draw` make drawings. A notebook shows a drawing that is the value of a cell.

    Args:
        scene: What is drawn.
        theme: "light", "dark", or None for the value of FUNCCOLL_THEME at rendering, which is "light" by default.

    Raises:
        DrawingError: If there is no such theme.

    Example:
        >>> drawing = fc.schedules.build("all_gather", 4, "ring").draw()
        >>> print(drawing.title)
        all_gather on 4 ranks: ring, 3 rounds, 1 chunk per block
        >>> print(drawing.with_theme("dark").theme)
        dark
    """

    scene: Scene
    theme: str | None = None

    def __post_init__(self) -> None:
        if self.theme is not None:
            find_theme(self.theme)

    @property
    def title(self) -> str:
        """The title: what is drawn, with its sizes."""
        return self.scene.title

    def with_theme(self, theme: str) -> Drawing:
        """Return the same drawing in another theme.

        Args:
            theme: "light" or "dark".

        Returns:
            A `Drawing`.

        Raises:
            DrawingError: If there is no such theme.
        """
        return replace(self, theme=theme)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing as SVG or PNG (150 dots per inch).

        Equal drawings give equal bytes. The file appears only after all of it is written.

        Args:
            path: The file. Its suffix, .svg or .png, chooses the format.

        Returns:
            The path.

        Raises:
            DrawingError: If the path has another suffix.
            MissingPackageError: If matplotlib is not installed.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        render = _FORMATS.get(path.suffix.lower())
        if render is None:
            raise DrawingError(
                f"{path.name!r} has the suffix {path.suffix!r}, and a drawing is saved as {' or '.join(_FORMATS)}. For a page "
                "with plotly in it write drawing.to_plotly().write_html(path)."
            )
        content = render(self.scene, find_theme(self.theme))
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.chmod(beside, 0o666 & ~_umask())  # as open() makes files: mkstemp's are private
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
        return path

    def to_svg(self) -> str:
        """Return the drawing as SVG.

        Returns:
            The text of a file.

        Raises:
            MissingPackageError: If matplotlib is not installed.
        """
        return _svg(self.scene, find_theme(self.theme)).decode()

    def inline_svg(self) -> str:
        """Return the drawing as an <svg> element for a page of HTML. It is smaller than a file, because its texts are texts.

        Returns:
            The text of the element.

        Raises:
            MissingPackageError: If matplotlib is not installed.
        """
        from .static_figure import svg_text

        return svg_text(self.scene, find_theme(self.theme), inline=True)

    def to_plotly(self) -> Any:
        """Return the drawing as a plotly figure.

        Returns:
            A `plotly.graph_objects.Figure`.

        Raises:
            MissingPackageError: If plotly is not installed.
        """
        from .plotly_figure import plotly_figure

        return plotly_figure(self.scene, find_theme(self.theme))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .plotly_figure import plotly_json
        from .static_figure import png_bytes

        theme = find_theme(self.theme)
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        figure = plotly_json(self.scene, theme)
        figure["config"] = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
        bundle["application/vnd.plotly.v1+json"] = figure
        try:
            image = png_bytes(self.scene, theme, dpi=110, colours=_COLOURS, most=_PIXELS)
            bundle["image/png"] = base64.b64encode(image).decode()
        except MissingPackageError as error:
            bundle["text/plain"] += f"\n{error.args[0].splitlines()[0]}"
        return bundle

    def __repr__(self) -> str:
        return f'<Drawing: {self.title}; .save("drawing.svg") writes it>'


def _umask() -> int:
    """Return the umask. It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
