"""Printed paths with numbers in them: what patterns and replacements are that can change places.

    ^params/layer_(\\d+)/w$   ('params/layer_', 1, '/w')       layers/\\1/w   ('layers/', 1, '/w')
    ^params/layer_(\\d+)/     the same for all that is in a module: ('params/layer_', 1, '/')

Pure.
"""

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from reshard.convert.replacement import (
    Pattern,
    Replacement,
    literal_replacement,
    parse_replacement,
    whole_path,
)
from reshard.tree import format_path, glob_key, split_path

_PATTERN = re.compile(r"(\(\\d\+\))|\\([1-9]\d?)|\\([^a-zA-Z0-9])|([^\\.^$*+?{}\[\]|()])")
_REPLACEMENT = re.compile(r"\\(?:g<([1-9]\d?)>|([1-9]\d?))|(\\)\\|([^\\]+)")
_POSITION = ast.dump(ast.Name("i", ast.Load()))


@dataclasses.dataclass(frozen=True, slots=True)
class PathTemplate:
    """A printed path, or the beginning of one, in which numbers are left open.

    Attributes:
      pieces: texts, and numbers of groups; 0 is the position of a part, `{}` in a replacement.
      whole: whether it is all of the path, and not the name of a module with a slash behind.
    """

    pieces: tuple[str | int, ...]
    whole: bool = True

    @classmethod
    def of(cls, pieces: Iterable[str | int], whole: bool) -> "PathTemplate":
        """One of pieces, of which texts may follow each other."""
        found: list[str | int] = []
        for piece in pieces:
            last = found[-1] if found else None
            if isinstance(piece, str) and isinstance(last, str):
                found[-1] = last + piece
            elif piece != "":
                found.append(piece)
        return cls(tuple(found), whole)

    @property
    def groups(self) -> tuple[int, ...]:
        """The numbers of its groups, in the order of the pattern."""
        return tuple(dict.fromkeys(piece for piece in self.pieces if isinstance(piece, int)))

    @property
    def glob(self) -> str:
        """A glob for what the pattern matches, and for other texts in the place of numbers."""
        text = "".join("\uffff" if isinstance(piece, int) else piece for piece in self.pieces)
        keys = split_path(text if self.whole else text.removesuffix("/"))
        return format_path(tuple(glob_key(key).replace("\uffff", "*") for key in keys))

    def pattern(self) -> Pattern:
        """The regex whose groups are the numbers.

        Raises:
          ValueError: a number would be beside another one.
        """
        if self.whole and not self.groups:
            return whole_path("".join(map(str, self.pieces)))
        text, plain = "^", ""
        for piece in self.pieces:
            number = "0" if isinstance(piece, int) else piece
            if plain[-1:].isdecimal() and number[:1].isdecimal():
                raise ValueError("numbers are beside each other: where one ends is not said")
            plain += number
            if isinstance(piece, str):
                text += re.escape(piece)
            else:
                group = self.groups.index(piece) + 1
                known = text.count(r"(\d+)")
                text += rf"\{group}" if group <= known else r"(\d+)"
        return Pattern(text + "$" * self.whole, None)

    def replacement(self, pattern: "PathTemplate") -> Replacement:
        """The text with the numbers that a pattern has found.

        Raises:
          ValueError: it has not found all of them.
        """
        if not self.groups:
            return literal_replacement("".join(map(str, self.pieces)))
        text = ""
        for piece, after in zip(self.pieces, (*self.pieces[1:], ""), strict=True):
            if isinstance(piece, str):
                text += literal_replacement(piece).text
            elif piece in pattern.groups:
                group = pattern.groups.index(piece) + 1
                text += rf"\g<{group}>" if str(after)[:1].isdecimal() else rf"\{group}"
            elif piece == 0:
                text += "{}"
            else:
                raise ValueError(f"what group {piece} matches is lost")
        return parse_replacement(text, [pattern.pattern()], ["i"])

    def numbered(self, group: int) -> "PathTemplate":
        """The same with the position of a part in the place of a group."""
        pieces = tuple(0 if piece == group else piece for piece in self.pieces)
        return PathTemplate(pieces, self.whole)


def pattern_template(pattern: Pattern) -> PathTemplate:
    """The template of a pattern.

    Raises:
      ValueError: it has none.
    """
    if pattern.literal is not None:
        return PathTemplate((pattern.literal,))
    whole = pattern.text.endswith("$")
    pieces: list[str | int] = []
    body = pattern.text[1 : -1 if whole else None]
    for groups in _tokens(_PATTERN, body) if pattern.text.startswith("^") else (None,):
        if groups is None:
            raise ValueError(r"it is not `^...$` or `^.../` without wildcards but `(\d+)`")
        group, again, *texts = groups
        if group is not None:
            pieces.append(1 + sum(isinstance(piece, int) for piece in set(pieces)))
        elif again is not None:
            pieces.append(int(again))
        else:
            pieces.append("".join(text or "" for text in texts))
    if not whole and pieces and pieces[-1] != "/":
        raise ValueError(r"it is not `^...$` or `^.../` without wildcards but `(\d+)`")
    return PathTemplate.of(pieces, whole)


def replacement_template(replacement: Replacement, whole: bool) -> PathTemplate:
    """The template of a replacement of whole paths, or of the names of modules.

    Raises:
      ValueError: it has none.
    """
    pieces: list[str | int] = []
    if replacement.constant is not None:
        pieces.append(replacement.constant)
    for part in replacement.parts if replacement.constant is None else ():
        if isinstance(part, ast.expr):
            tokens = [("0", None, None, None)] if ast.dump(part) == _POSITION else [None]
        else:
            tokens = _tokens(_REPLACEMENT, part)
        for groups in tokens:
            if groups is None:
                raise ValueError(f"`{replacement.text}` has more in it than text and `\\1`")
            number = groups[0] or groups[1]
            pieces.append((groups[2] or groups[3] or "") if number is None else int(number))
    template = PathTemplate.of(pieces, whole)
    if not whole and pieces and not str(template.pieces[-1]).endswith("/"):
        raise ValueError(f"`{replacement.text}` does not end as the regex does, with a slash")
    return template


def _tokens(regex: re.Pattern[str], text: str) -> Iterator[Sequence[str | None] | None]:
    """The groups of one match after another; None where there is none any more."""
    at = 0
    while at < len(text):
        match = regex.match(text, at)
        if match is None:
            yield None
            return
        yield match.groups()
        at = match.end()
