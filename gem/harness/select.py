"""`-k EXPR`: choose cases by pytest's expression language over their ids: substrings, `and`, `or`, `not`, brackets.

``gdpa and not backward`` keeps each case whose id contains "gdpa" and not "backward", upper or lower case alike.
"""

import re
from collections.abc import Callable

from gem.errors import RequestError

_TOKEN = re.compile(r"\s*(?:(?P<bracket>[()])|(?P<word>[\w:+\-./\\\[\]]+))")
Matcher = Callable[[str], bool]


def compile_expression(expression: str) -> Matcher:
    """A function that says whether a case id is chosen. Raises RequestError naming the place of a mistake."""
    return _Parser(expression).parse()


class _Parser:
    """Recursive descent over ``or`` < ``and`` < ``not`` < word or brackets."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tokens: list[tuple[str, int]] = []
        position = 0
        text = expression.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise self._error(f"unexpected {text[at]!r}", at)
            self.tokens.append((match.group().strip(), match.end() - len(match.group().strip())))
            position = match.end()
        self.at = 0

    def _error(self, what: str, position: int) -> RequestError:
        return RequestError(
            f"-k {self.expression!r}: {what} at column {position + 1}; accepted: substrings of case ids joined by "
            "and, or, not and brackets"
        )

    def _peek(self) -> str | None:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def _take(self, word: str) -> bool:
        if self._peek() == word:
            self.at += 1
            return True
        return False

    def _here(self) -> tuple[str, int]:
        if self.at < len(self.tokens):
            token, position = self.tokens[self.at]
            return f"unexpected {token!r}", position
        return "the expression ends too early", len(self.expression.rstrip())

    def parse(self) -> Matcher:
        if not self.tokens:
            raise self._error("nothing to match", 0)
        matcher = self._either()
        if self.at < len(self.tokens):
            raise self._error(*self._here())
        return matcher

    def _either(self) -> Matcher:
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return lambda text: any(part(text) for part in parts)

    def _both(self) -> Matcher:
        parts = [self._negated()]
        while self._take("and"):
            parts.append(self._negated())
        return lambda text: all(part(text) for part in parts)

    def _negated(self) -> Matcher:
        if self._take("not"):
            inner = self._negated()
            return lambda text: not inner(text)
        if self._take("("):
            inner = self._either()
            if not self._take(")"):
                raise self._error(*self._here())
            return inner
        word = self._peek()
        if word is None or word in (")", "and", "or"):
            raise self._error(*self._here())
        self.at += 1
        wanted = word.lower()
        return lambda text: wanted in text.lower()
