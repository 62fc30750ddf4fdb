"""Comments beside the fields of values, which give their units and rules, as a table in the reference.

An extension of griffe, which mkdocstrings reads the code with: mkdocs.yml names it.
"""

import io
import tokenize
from typing import Any

from griffe import Attribute, Class, Docstring, Extension


class FieldComments(Extension):
    """Adds a section ``Attributes`` to the docstring of a class whose fields have comments."""

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """Called once for each class."""
        if cls.docstring is None or "Attributes:" in cls.docstring.value:
            return
        rows = []
        for name, member in cls.members.items():
            if isinstance(member, Attribute) and not name.startswith("_") and member.docstring is None:
                comment = comment_of(member.lines)
                if comment:
                    rows.append(f"    {name}: {comment}")
        if rows:
            text = cls.docstring.value.rstrip() + "\n\nAttributes:\n" + "\n".join(rows)
            cls.docstring = Docstring(text, parent=cls, parser=cls.docstring.parser)


def comment_of(lines: list[str]) -> str:
    """Return what a field's lines say after the number sign."""
    said = []
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines).strip() + "\n").readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
                said.append(token.string.lstrip("# ").strip())
    except (tokenize.TokenError, IndentationError):
        return ""
    return " ".join(said)
