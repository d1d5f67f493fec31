"""Reads the fields of a client's JSON one by one. Each field is checked, and an error has the path of the field in the request.

Values are not trusted: the size of a value is limited before the value is compared or stored. A null is treated as a missing
field.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.call_json import MAX_DIGITS, nesting, parse_digits
from agentrl.workflow.dialects import RequestError

MAX_NESTING = 64
MAX_INTEGER = 10**MAX_DIGITS
"""The exclusive upper limit of integers. It is a constant, because computing this power takes long."""
SHOWN = 100
"""The most characters of a client's text that an error message repeats."""


def load_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        RequestError: the body is not a JSON object, is nested too deep, or has numbers that JSON does not allow.
    """
    try:
        value = json.loads(body, parse_int=parse_digits, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # also of a body that is not UTF-8
        problem = str(error).partition("\n")[0][:SHOWN]
        raise RequestError(400, f"The body is not valid JSON: {problem}.") from error
    if nesting(value) > MAX_NESTING:
        raise _too_deep()
    if not isinstance(value, dict):
        raise RequestError(400, f"The body must be a JSON object, not {_kind(value)}.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid JSON number")


def _too_deep() -> RequestError:
    return RequestError(400, f"The body nests more than {MAX_NESTING} objects and arrays within each other.")


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object in a request, and the path of the object (`messages[3].`)."""

    values: Mapping[str, Any]
    at: str = ""

    def error(self, name: str, problem: str, code: str = "") -> RequestError:
        """Return the error for a field."""
        where = f"{self.at}{name}"
        return RequestError(400, f"{where}: {problem}.", code, where)

    def has(self, name: str) -> bool:
        """Return True if the field exists and is not null."""
        return self.values.get(name) is not None

    def text(self, name: str, max_chars: int | None = None) -> str:
        """Return a text; empty if the field is missing."""
        value = self.values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._type_error(name, "a text", value)
        if max_chars is not None and len(value) > max_chars:
            raise self.error(name, f"it has {len(value)} characters, at most {max_chars} are accepted")
        return self._clean(name, value)

    def flag(self, name: str) -> bool:
        """Return the boolean value of a field; False if the field is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._type_error(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        """Return an integer from `lowest` to `highest`; None if the field is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._type_error(name, "a whole number", value)
        if not lowest <= value <= highest:
            raise self.error(name, f"it must be between {lowest} and {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float | int | None:
        """Return a number from `lowest` to `highest`; None if the field is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._type_error(name, "a number", value)
        if not (lowest <= value <= highest and math.isfinite(value)):
            raise self.error(name, f"it must be between {lowest:g} and {highest:g}")
        return value

    def object(self, name: str) -> "Fields":
        """Return an object; an empty one if the field is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._type_error(name, "an object", value)
        return Fields(value or {}, f"{self.at}{name}.")

    def array(self, name: str, max_items: int) -> list[Any]:
        """Return an array of at most `max_items` items; an empty array if the field is missing."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._type_error(name, "an array", value)
        if len(value) > max_items:
            raise self.error(name, f"it has {len(value)} entries, at most {max_items} are accepted")
        return value

    def objects(self, name: str, max_items: int) -> Iterator["Fields"]:
        """Yield the objects of an array of at most `max_items` items."""
        for number, value in enumerate(self.array(name, max_items)):
            if not isinstance(value, dict):
                raise self._type_error(f"{name}[{number}]", "an object", value)
            yield Fields(value, f"{self.at}{name}[{number}].")

    def texts(self, name: str, max_texts: int, max_chars: int) -> tuple[str, ...]:
        """Return the texts of a field that is a text or an array of texts. Empty texts are refused."""
        value = self.values.get(name)
        listed = Fields({name: [value] if isinstance(value, str) else value}, self.at).array(name, max_texts)
        texts = [Fields({name: one}, self.at).text(name, max_chars) for one in listed]
        if not all(texts):
            raise self.error(name, "it must contain at least one text, and no empty one")
        return tuple(texts)

    def unknown_error(self, name: str) -> RequestError:
        """Return the error for an unknown field, in the API's wording."""
        return RequestError(400, f"Unrecognized request argument supplied: {self.at}{_shown(name)}")

    def _type_error(self, name: str, type_name: str, value: Any) -> RequestError:
        return self.error(name, f"it must be {type_name}, not {_kind(value)}")

    def _clean(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(name, "it contains an unpaired surrogate") from error
        return value.replace("\0", "\ufffd")  # no database holds it; it must read the same when it comes again


def clean_tree(fields: Fields, name: str, value: Any) -> Any:
    """Return a JSON value in which every database can store all texts and numbers, and every tokenizer can encode all texts.

    Raises:
        RequestError: a number is too large, or a text has an unpaired surrogate.
    """
    if isinstance(value, str):
        return fields._clean(name, value)
    if isinstance(value, dict):
        return {fields._clean(name, key): clean_tree(fields, name, item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_tree(fields, name, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise fields.error(name, "it contains a number that is too large")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise fields.error(name, "it contains a number with too many digits")
    return value


def _shown(name: str) -> str:
    return name[:SHOWN].encode("utf-8", "replace").decode()


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", str: "a text", dict: "an object", list: "an array", type(None): "null"}
    return kinds.get(type(value), "a number")
