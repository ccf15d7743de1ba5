"""What objects does a pickle describe, without making any of them?

Decision: every instruction is known, and one that is not ends the reading: there is no way past it. What
each does is :class:`PickleMachine`'s; here stands which byte means what. Turned down: a list of forbidden
names, which a crafted file walks around, and :mod:`pickletools`, which knows what instructions look like
and not what they make.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from ckptrun.inspect.pickle_machine import PickleMachine
from ckptrun.inspect.pickle_operands import INT32, UINT8, UINT16, UINT32, UINT64, Operands
from ckptrun.inspect.pickle_values import Global, Instance, MalformedPickleError, record_call

MAX_INSTRUCTIONS = 50_000_000
_CHECK_EVERY = 4096


class PickleReader:
    """Reads the pickles of a file, one after the other.

    Args:
        file: positioned at the first byte of a pickle; after :meth:`load` at the one after it.
        end: position in the file which no pickle reaches beyond.
        persistent: makes a value from a persistent id (how torch refers to storages).
        rebuild: makes a value from a call's function and arguments.
    """

    def __init__(
        self,
        file: BinaryIO,
        end: int,
        *,
        persistent: Callable[[Any], Any] = lambda pid: Instance("persistent id", (pid,)),
        rebuild: Callable[[Any, tuple[Any, ...]], Any] = record_call,
        max_instructions: int = MAX_INSTRUCTIONS,
    ) -> None:
        self._machine = PickleMachine(file, end, persistent, rebuild)
        self._instructions_left = max_instructions

    @property
    def globals(self) -> list[Global]:
        """Every class and function that was named so far, in the order of the file."""
        return list(self._machine.globals.values())

    @property
    def num_dropped(self) -> int:
        """Plain values of very long containers that were not kept."""
        return self._machine.num_dropped

    def load(self) -> Any:
        """The object of the next pickle.

        Raises:
            MalformedPickleError: there is none, or it is cut off, or it breaks a limit.
        """
        machine = self._machine
        file, read, actions = machine.file, machine.file.read, _ACTIONS
        try:
            while True:
                for _ in range(_CHECK_EVERY):
                    code = read(1)
                    if code == b".":
                        machine.check_limits()
                        return machine.stack.pop()
                    if not code:
                        raise MalformedPickleError("it is cut off")
                    action = actions[code[0]]
                    if action is None:
                        raise MalformedPickleError(
                            f"0x{code.hex()} before byte {file.tell()} is no pickle instruction"
                        )
                    action(machine)
                machine.check_limits()
                self._instructions_left -= _CHECK_EVERY
                if self._instructions_left < 0:
                    raise MalformedPickleError("it has more instructions than are looked at")
        except IndexError:
            raise MalformedPickleError(
                f"the instruction before byte {file.tell()} lacks its operand"
            ) from None
        except UnicodeError:
            raise MalformedPickleError(f"the text before byte {file.tell()} is no text") from None
        finally:
            machine.clear()


_Action = Callable[[PickleMachine], None]


def _push(read: Callable[[PickleMachine, int], Any], length: struct.Struct) -> _Action:
    """Push what ``read`` makes of as many bytes as a length in front of them says."""
    return lambda machine: machine.stack.append(read(machine, machine.number(length)))


def _with(action: Callable[[PickleMachine, int], None], layout: struct.Struct) -> _Action:
    return lambda machine: action(machine, machine.number(layout))


def _number(layout: struct.Struct) -> _Action:
    return lambda machine: machine.stack.append(machine.number(layout))


def _constant(value: Any) -> _Action:
    return lambda machine: machine.stack.append(value)


def _short_tuple(size: int) -> _Action:
    return lambda machine: machine.make_short_tuple(size)


def _nothing(machine: PickleMachine) -> None:
    """READONLY_BUFFER: there are no buffers here."""


# The letters are the instructions' own; pickletools describes each.
_INSTRUCTIONS: dict[bytes, _Action] = {
    b"\x80": PickleMachine.protocol,
    b"\x95": PickleMachine.frame,
    # plain values
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": PickleMachine.push_int_line,
    b"L": PickleMachine.push_long_line,
    b"J": _number(INT32),
    b"K": _number(UINT8),
    b"M": _number(UINT16),
    b"\x8a": _push(Operands.long_int, UINT8),
    b"\x8b": _push(Operands.long_int, INT32),
    b"F": PickleMachine.push_float_line,
    b"G": lambda machine: machine.stack.append(machine.double()),
    b"S": PickleMachine.push_string_line,
    b"U": _push(Operands.old_text, UINT8),
    b"T": _push(Operands.old_text, INT32),
    b"V": PickleMachine.push_unicode_line,
    b"\x8c": _push(Operands.text, UINT8),
    b"X": _push(Operands.text, UINT32),
    b"\x8d": _push(Operands.text, UINT64),
    b"C": _push(Operands.bytes_object, UINT8),
    b"B": _push(Operands.bytes_object, UINT32),
    b"\x8e": _push(Operands.bytes_object, UINT64),
    b"\x96": _push(Operands.bytes_object, UINT64),
    b"\x97": PickleMachine.push_outside_buffer,
    b"\x98": _nothing,
    # containers
    b"]": PickleMachine.push_list,
    b"}": PickleMachine.push_dict,
    b"\x8f": PickleMachine.push_set,
    b")": _constant(()),
    b"t": PickleMachine.make_tuple,
    b"\x85": _short_tuple(1),
    b"\x86": _short_tuple(2),
    b"\x87": _short_tuple(3),
    b"l": PickleMachine.make_list,
    b"d": PickleMachine.make_dict,
    b"\x91": PickleMachine.make_frozenset,
    b"a": PickleMachine.append,
    b"e": PickleMachine.append_many,
    b"\x90": PickleMachine.append_many,
    b"s": PickleMachine.set_item,
    b"u": PickleMachine.set_items,
    # stack and memo
    b"(": PickleMachine.mark,
    b"0": PickleMachine.drop,
    b"1": PickleMachine.drop_since_mark,
    b"2": PickleMachine.duplicate,
    b"p": PickleMachine.put_line,
    b"q": _with(PickleMachine.put, UINT8),
    b"r": _with(PickleMachine.put, UINT32),
    b"\x94": PickleMachine.put_next,
    b"g": PickleMachine.get_line,
    b"h": _with(PickleMachine.get, UINT8),
    b"j": _with(PickleMachine.get, UINT32),
    # names, calls and state
    b"c": PickleMachine.push_global,
    b"\x93": PickleMachine.make_global,
    b"\x82": _with(PickleMachine.push_extension, UINT8),
    b"\x83": _with(PickleMachine.push_extension, UINT16),
    b"\x84": _with(PickleMachine.push_extension, INT32),
    b"R": PickleMachine.call,
    b"\x81": PickleMachine.new_object,
    b"\x92": PickleMachine.new_object_with_keywords,
    b"i": PickleMachine.instance_of_name,
    b"o": PickleMachine.instance_since_mark,
    b"b": PickleMachine.build,
    b"P": PickleMachine.push_persistent_line,
    b"Q": PickleMachine.make_persistent,
}
_ACTIONS: tuple[_Action | None, ...] = tuple(_INSTRUCTIONS.get(bytes([code])) for code in range(256))
