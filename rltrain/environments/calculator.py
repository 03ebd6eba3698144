"""Tasks with a calculator. It evaluates arithmetic without running programs."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from rltrain.environments.tool_task import Tool, ToolFailed, ToolTask

# Values of arithmetic expressions.

MAX_CHARS = 200
MAX_BITS = 4096
"""Maximal bits of the numerator and the denominator of any intermediate value."""

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class NoValue(Exception):  # noqa: N818 - a finding about the model's text
    """An expression has no value. The model sees the message."""


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of numbers, + - * / // % ** and brackets. ^ means **, and commas between digits are
    ignored.

    MAX_CHARS and MAX_BITS bound the time. Raises NoValue if there is no value.
    """
    text = expression.strip().replace("^", "**").replace(",", "")
    if len(text) > MAX_CHARS:
        raise NoValue(f"an expression may have {MAX_CHARS} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NoValue("this is no arithmetic expression") from error
    return _value(tree.body)


def shown(value: Fraction) -> str:
    """Returns whole numbers exactly, and others as decimals of up to 12 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _number(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _small(_operate(OPERATIONS[type(operation)], _value(left), _value(right)))
    raise NoValue("only numbers, + - * / // % ** and brackets have a value")


def _number(number: int | float) -> Fraction:
    try:
        return _small(Fraction(repr(number)))
    except ValueError as error:
        raise NoValue("that number is too large") from error


def _operate(operation: Callable[[Fraction, Fraction], Fraction], left: Fraction, right: Fraction) -> Fraction:
    try:
        return operation(left, right)
    except ZeroDivisionError as error:
        raise NoValue("division by zero") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NoValue("only whole numbers can be exponents")
    if base == 0 and exponent < 0:
        raise NoValue("division by zero")
    if abs(base) != 1 and base != 0 and _bits(base) * abs(exponent) > MAX_BITS:
        raise NoValue("the value is too large")
    if abs(base) == 1:
        return Fraction(1) if exponent % 2 == 0 else base
    return _small(base ** int(exponent))


def _small(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise NoValue("the value is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


# Tasks with a calculator.


class Calculator(ToolTask):
    """A ToolTask with a calculator. Without a chat template the model writes opening + expression + closing. It then
    sees equals + the value + a newline."""

    def __init__(
        self,
        *,
        max_turns: int = 8,
        label_key: str = "label",
        opening: str = "<calc>",
        closing: str = "</calc>",
        equals: str = "=",
    ) -> None:
        tool = Tool(
            "calculate",
            "The exact value of an arithmetic expression.",
            "expression",
            "numbers, + - * / // % ** and brackets, such as (3+4)*12",
            re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL),
            f"{equals}{{}}\n",
        )
        super().__init__(tool, max_turns=max_turns, label_key=label_key)

    def use(self, argument: str) -> str:
        try:
            return shown(evaluate(argument))
        except NoValue as problem:
            raise ToolFailed(str(problem)) from problem
