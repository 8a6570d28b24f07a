"""Mark short code with a hyphen, such as an option, so that the style sheet can keep it on one line."""

from __future__ import annotations

import re
from typing import Any

_SHORT = re.compile(r"<code>(?=[^<\n]{1,24}</code>)([^<\n]*-[^<\n]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page as HTML."""
    return _SHORT.sub(r'<code class="whole">\1</code>', html)
