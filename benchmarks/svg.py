"""Elements of a drawing in SVG. All text is escaped."""

from __future__ import annotations

from html import escape


def number(value: float) -> str:
    """Format a coordinate with one decimal, without trailing zeros."""
    rounded = f"{value:.1f}".removesuffix(".0")
    return "0" if rounded == "-0" else rounded


def element(name: str, content: str | None = None, /, **attributes: str | float) -> str:
    """Return one SVG element. Attribute values are escaped; ``content`` must be markup.

    A trailing underscore of an attribute name is dropped and inner ones become hyphens: ``class_``, ``text_anchor``.
    """
    parts = [name]
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else number(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown, quote=True)}"')
    head = " ".join(parts)
    return f"<{head}/>" if content is None else f"<{head}>{content}</{name}>"


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "") -> str:
    """Return a line of text with its baseline at ``y``; ``content`` is escaped."""
    extra = {"class_": class_} if class_ else {}
    where = {"text_anchor": anchor} if anchor != "start" else {}
    return element("text", escape(content), x=x, y=y, **where, **extra)
