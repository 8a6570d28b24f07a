"""A saved measurement for people: on the terminal, as Markdown, or as one HTML page."""
