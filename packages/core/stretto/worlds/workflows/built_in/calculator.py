"""Calculator for a model: arithmetic on numbers, bounded so that no expression takes long."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_MOST_CHARACTERS, _LARGEST_POWER, _LARGEST = 500, 64, 1e30
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Value of an arithmetic expression, as text.

    >>> calculate("(3 + 4) * 5"), calculate("7 / 2")
    ('35', '3.5')

    Raises:
        ValueError: the text is not arithmetic, is too long, or its numbers or powers are too large.
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if float(value).is_integer() else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found: float = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            found = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(other) > _LARGEST_POWER:
                raise ValueError(f"a power of {other:g}; {_LARGEST_POWER} is the largest")
            found = _OPERATORS[type(op)](one, other)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
    if isinstance(found, complex) or not abs(found) <= _LARGEST:
        raise ValueError("a number is too large, or not a real number")
    return found
