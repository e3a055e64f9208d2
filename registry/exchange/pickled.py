"""Numbers, strings and NumPy arrays from a pickle, without running it.

A pickle is a program, and the standard reader runs it.  This one knows the few instructions that build lists, dicts
and arrays, gives its own meaning to the six names that NumPy's arrays need, and refuses every other name before
anything is called.  No function named in the file is ever looked up, let alone NumPy's own, which trust their
arguments.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from registry.errors import Unparseable, Unsupported

Array = np.ndarray[Any, np.dtype[Any]]

_MARK = object()
_NUMERIC = re.compile(r"[fiu][1248]|b1|U\d{1,5}")
_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("STRING", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Name:
    """One of the admitted names; stands for it on the stack."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code, self.order = code, "="

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order.replace("|", "=") + self.code)


class PickledArray:
    """An array that may still wait for its content: a pickle mentions it before it fills it."""

    value: Array | None = None


def read(path: Path) -> Any:
    """What the pickle holds: str, int, float, bool, None, list, tuple, dict (keys str or int), PickledArray.

    Raises Unsupported naming the first thing that is none of these, Unparseable for a damaged file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Machine(path).run(content)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise Unparseable(
            f"{path} is not a whole pickle ({error})", hint="fetch the file again; nothing was stored"
        ) from error


class _Machine:
    """The stack of the format, see `pickletools` for each instruction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: mmap.mmap) -> Any:
        for opcode, argument, _ in pickletools.genops(content):  # type: ignore[arg-type]  # it reads, tells, lines
            name = opcode.name
            if name in _PUSHED:
                self.stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in ("GLOBAL", "INST"):
                self.stack.append(self.admitted(str(argument)))
            elif name == "STOP":
                return self.pop()
            elif name not in ("PROTO", "FRAME"):
                step = _STEPS.get(name)
                if step is None:
                    raise Unsupported(
                        f"{self.path} uses the pickle instruction {name}, which builds objects modelkin does not load",
                        hint=_HINT,
                    )
                step(self, argument)
        raise ValueError("it does not end")

    def admitted(self, name: str) -> _Name:
        known = name.replace("numpy.core.", "numpy._core.")
        if known not in _CALLS and known != "numpy ndarray":
            raise Unsupported(
                f"{self.path} asks for {name.replace(' ', '.')}; only numbers, strings and NumPy arrays are loaded "
                "from a pickle, and nothing in it was run",
                hint=_HINT,
            )
        return _Name(known)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            if at == 0:
                raise ValueError("a mark is missing")
            at -= 1
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{type(self.stack[-1]).__name__} where a {kind.__name__} should be")
        return self.stack[-1]

    def pop_last(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def set_items(self, flat: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, (str, int)):  # hashing a tuple nested a million times deep ends the process
                raise ValueError(f"a dict key is a {type(key).__name__}")
            target[key] = value

    def call(self) -> None:
        function, arguments = self.pop_last(2)
        if not isinstance(function, _Name) or function.name not in _CALLS or not isinstance(arguments, tuple):
            raise ValueError("a call of something that cannot be called")
        self.stack.append(_CALLS[function.name](*arguments))

    def build(self) -> None:
        target, state = self.pop_last(2)
        if isinstance(target, _Dtype):
            _set_order(target, state)
        elif isinstance(target, PickledArray) and target.value is None:
            _, shape, dtype, fortran, data = state
            target.value = _array(data, dtype, shape, "F" if fortran is True else "C")
        else:
            raise ValueError(f"state for a {type(target).__name__}")
        self.stack.append(target)


_HINT = "convert it where it can be trusted: numpy.savez(FILE, models=names, values=matrix)"


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
        raise ValueError("an array's description is malformed")
    if not 1 <= len(shape) <= 2 or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"an array of shape {shape!r:.80}")
    raw = data.encode("latin-1") if isinstance(data, str) else data
    kind = dtype.dtype()
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError("an array's content is not of its size")
    flat = np.frombuffer(raw, kind) if raw else np.empty(0, kind)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    made = PickledArray()
    made.value = _array(data, dtype, shape, order)
    return made


def _reconstruct(*arguments: Any) -> PickledArray:
    if not arguments or not isinstance(arguments[0], _Name) or arguments[0].name != "numpy ndarray":
        raise ValueError("an array of another kind than numpy.ndarray")
    return PickledArray()


def _dtype(code: Any, *_: Any) -> _Dtype:
    if not isinstance(code, str) or not _NUMERIC.fullmatch(code.lstrip("<>|=")):
        raise Unsupported(f"the pickle holds an array of type {code!r:.40}, not numbers or names", hint=_HINT)
    made = _Dtype(code.lstrip("<>|="))
    made.order = code[0] if code[0] in "<>" else "="
    return made


def _set_order(dtype: _Dtype, state: Any) -> None:
    order = state[1]
    if order not in ("<", ">", "|", "="):
        raise ValueError("a byte order that is none")
    dtype.order = order


def _scalar(dtype: Any, data: Any) -> Any:
    return _array(data, dtype, (1,), "C")[0].item()


def _encode(text: Any, encoding: Any) -> bytes:
    """How the bytes of an array travel in the oldest protocols."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("an unexpected encoding")
    return text.encode("latin-1")


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy._core.multiarray _reconstruct": _reconstruct,
    "numpy._core.multiarray scalar": _scalar,
    "numpy._core.numeric _frombuffer": _frombuffer,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = machine.pop_last(2)
    machine.stack.append(machine.admitted(f"{module} {name}"))


def _store(machine: _Machine, place: Any) -> None:
    machine.memo[int(place)] = machine.stack[-1]


def _dict(machine: _Machine, _: Any) -> None:
    flat = machine.pop_to_mark()
    machine.stack.append({})
    machine.set_items(flat)


_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "MARK": lambda m, _: m.stack.append(_MARK),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.stack.append(m.pop_last(1)),
    "TUPLE2": lambda m, _: m.stack.append(m.pop_last(2)),
    "TUPLE3": lambda m, _: m.stack.append(m.pop_last(3)),
    "DICT": _dict,
    "APPEND": lambda m, _: (lambda value: m.top(list).append(value))(m.pop()),
    "APPENDS": lambda m, _: (lambda values: m.top(list).extend(values))(m.pop_to_mark()),
    "SETITEM": lambda m, _: (lambda pair: m.set_items(list(pair)))(m.pop_last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "PUT": _store,
    "BINPUT": _store,
    "LONG_BINPUT": _store,
    "MEMOIZE": lambda m, _: _store(m, len(m.memo)),
    "GET": lambda m, place: m.stack.append(m.memo[int(place)]),
    "BINGET": lambda m, place: m.stack.append(m.memo[place]),
    "LONG_BINGET": lambda m, place: m.stack.append(m.memo[place]),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}
