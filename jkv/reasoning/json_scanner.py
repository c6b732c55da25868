"""Follows a JSON text character by character, so that what a model writes can be passed on before it is whole."""

import re

SPACE = " \t\n\r"
SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPED = '"\\/bfnrt'
DEEPEST = 100  # levels, so that any reader can read what is taken
LONGEST_NUMBER = 400  # characters
HEXADECIMAL = "0123456789abcdefABCDEF"


class JsonScanner:
    r"""Receives a JSON object or list character by character, and refuses the first one that cannot follow.

    Attributes:
      wants: what may follow: "value", "value or end", "key", "key or end", ":", "after" (a comma, or the end of the innermost
        object or list); "string", "escape", "code" and "scalar" are inside of one; "nothing" is after the last character.

    >>> scanner = JsonScanner()
    >>> [scanner.take(char) for char in '{"a": [1]}'].count(True), scanner.is_done, scanner.take("x")
    (10, True, False)
    """

    def __init__(self) -> None:
        self.wants = "value"
        self._closers: list[str] = []
        self._is_key = False
        self._scalar = ""
        self._digits = 0  # of \u that are missing

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._closers)

    @property
    def is_done(self) -> bool:
        """Whether the outermost object or list has ended."""
        return self.wants == "nothing"

    @property
    def in_value(self) -> bool:
        """Whether the last character is inside of a text, number or word that is no key."""
        return self.wants == "scalar" or (self.wants in ("string", "escape", "code") and not self._is_key)

    def take(self, char: str) -> bool:
        """Whether the character may follow; after one that may not, no other is to be sent."""
        if self.wants in ("string", "escape", "code"):
            return self._in_string(char)
        if self.wants == "scalar":
            if char.isalnum() or char in "+-.":
                self._scalar += char
                return len(self._scalar) <= LONGEST_NUMBER
            if not SCALAR.fullmatch(self._scalar):
                return False
            self.wants = "after"
        if char in SPACE:
            return self.wants != "nothing"
        if self._closers and char == self._closers[-1]:
            return self._close()
        return self._begin(char)

    def _begin(self, char: str) -> bool:
        """Outside of texts and numbers."""
        wants = self.wants
        if wants in ("key", "key or end") and char == '"':
            self.wants, self._is_key = "string", True
        elif wants == ":" and char == ":":
            self.wants = "value"
        elif wants == "after" and char == ",":
            self.wants = "key" if self._closers[-1] == "}" else "value"
        elif wants in ("value", "value or end"):
            return self._value(char)
        else:
            return False
        return True

    def _value(self, char: str) -> bool:
        if char in "{[":
            if self.depth == DEEPEST:
                return False
            self._closers.append("}" if char == "{" else "]")
            self.wants = "key or end" if char == "{" else "value or end"
        elif not self._closers:  # a single text or number is no object or list
            return False
        elif char == '"':
            self.wants, self._is_key = "string", False
        elif char in "-0123456789tfn":
            self.wants, self._scalar = "scalar", char
        else:
            return False
        return True

    def _close(self) -> bool:
        if self.wants not in ("after", "key or end", "value or end"):
            return False
        self._closers.pop()
        self.wants = "after" if self._closers else "nothing"
        return True

    def _in_string(self, char: str) -> bool:
        if self.wants == "code":
            self._digits -= 1
            if not self._digits:
                self.wants = "string"
            return char in HEXADECIMAL
        if self.wants == "escape":
            self.wants, self._digits = ("code", 4) if char == "u" else ("string", 0)
            return char == "u" or char in ESCAPED
        if char == "\\":
            self.wants = "escape"
        elif char == '"':
            self.wants = ":" if self._is_key else "after"
        return char >= " "
