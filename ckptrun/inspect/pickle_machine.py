"""What does a pickle's instruction do to the stack?

Decision: the machine of all pickle protocols (0 to 5), working on values that only stand for objects. It
calls nothing, looks up no attribute that a file names, follows no nesting by recursion, and adds up what
the values take, so that no file can make it allocate much more than :data:`MAX_MEMORY`. Turned down:
``pickle.Unpickler`` with ``find_class`` overridden, which still calls what it is given and hashes, compares
and allocates as the file likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from ckptrun.inspect.pickle_operands import Operands, lenient_text, parse_int
from ckptrun.inspect.pickle_values import (
    SCALARS,
    Global,
    Instance,
    MalformedPickleError,
    Ordered,
    Oversized,
    as_key,
)

MAX_MEMORY = 256 << 20  # bytes that the values may take, by estimate
MAX_STACK = 2_000_000  # values that wait for an instruction
MAX_DEPTH = 5_000  # marks that are open at a time
MAX_SCALARS = 100_000  # plain numbers and strings kept in one container; the rest is counted

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2


class PickleMachine(Operands):
    """The state of reading a file's pickles, and one method for each thing that an instruction does.

    IndexError means that the stack was too short for it.
    """

    def __init__(
        self,
        file: BinaryIO,
        end: int,
        persistent: Callable[[Any], Any],
        rebuild: Callable[[Any, tuple[Any, ...]], Any],
    ) -> None:
        super().__init__(file, end)
        self.globals: dict[tuple[str, str], Global] = {}
        self.num_dropped = 0  # plain values of very long containers
        self.stack: list[Any] = []
        self._persistent = persistent
        self._rebuild = rebuild
        self._marks: list[list[Any]] = []
        self._memo: list[Any] = []
        self._far_memo: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the objects of a pickle that is done."""
        self.stack, self._marks, self._memo, self._far_memo = [], [], [], {}

    def check_limits(self) -> None:
        """To be called now and then.

        Raises:
            MalformedPickleError: the values take too much, or the pickle goes on beyond its end.
        """
        if self.memory > MAX_MEMORY:
            raise MalformedPickleError("its objects take more memory than is allowed here")
        if len(self._marks) > MAX_DEPTH or len(self.stack) + sum(map(len, self._marks)) > MAX_STACK:
            raise MalformedPickleError("it keeps more objects open than are looked at")
        if self.file.tell() > self.end:
            raise MalformedPickleError("it has no end")

    # Plain values.

    def push_int_line(self) -> None:
        line = self.line()
        self.stack.append(line == b"01" if line in (b"00", b"01") else parse_int(line))

    def push_long_line(self) -> None:
        self.stack.append(parse_int(self.line().removesuffix(b"L")))

    def push_float_line(self) -> None:
        try:
            self.stack.append(float(self.line()))
        except ValueError:
            raise MalformedPickleError("a number in it is none") from None

    def push_string_line(self) -> None:
        line = self.line().strip()
        if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
            raise MalformedPickleError("a string in it has no quotes")
        # Only the escapes that names have; Python's own decoding warns about some of the others.
        self.stack.append(lenient_text(line[1:-1].replace(b"\\'", b"'").replace(b"\\\\", b"\\")))

    def push_unicode_line(self) -> None:
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def push_outside_buffer(self) -> None:
        self.stack.append(Oversized("bytes kept outside of the pickle", 0))

    # The stack and the memo.

    def mark(self) -> None:
        self.memory += 64
        self._marks.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        values = self.stack
        self.stack = self._marks.pop()
        return values

    def drop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def drop_since_mark(self) -> None:
        self._since_mark()

    def duplicate(self) -> None:
        self.stack.append(self.stack[-1])

    def put(self, index: int) -> None:
        value = self.stack[-1]
        memo = self._memo
        # Picklers number in sequence, so that a list serves; any other number must not make it long.
        if index == len(memo):
            self.memory += 8
            memo.append(value)
        elif index < len(memo):
            memo[index] = value
        else:
            self.memory += 120
            self._far_memo[index] = value

    def put_line(self) -> None:
        index = parse_int(self.line())
        if not isinstance(index, int) or index < 0:
            raise MalformedPickleError("it notes an object under a number that is none")
        self.put(index)

    def put_next(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if 0 <= index < len(self._memo):
            self.stack.append(self._memo[index])
        elif index in self._far_memo:
            self.stack.append(self._far_memo[index])
        else:
            raise MalformedPickleError(f"it refers to object {index}, which it never noted")

    def get_line(self) -> None:
        index = parse_int(self.line())
        self.get(index if isinstance(index, int) else -1)

    # Containers.

    def push_list(self) -> None:
        self.memory += 88
        self.stack.append([])

    def push_dict(self) -> None:
        self.memory += 96
        self.stack.append({})

    def push_set(self) -> None:
        self.memory += 200
        self.stack.append(Instance(self._named("builtins", "set"), elements=[]))

    def make_frozenset(self) -> None:
        values = self._since_mark()
        self.memory += 200 + 8 * len(values)
        self.stack.append(Instance(self._named("builtins", "frozenset"), elements=values))

    def make_tuple(self) -> None:
        values = self._since_mark()
        self.memory += 56 + 8 * len(values)
        self.stack.append(tuple(values))

    def make_short_tuple(self, size: int) -> None:
        stack = self.stack
        if len(stack) < size:
            raise IndexError
        self.memory += 56 + 8 * size
        stack[-size:] = [tuple(stack[-size:])]

    def make_list(self) -> None:
        values = self._since_mark()
        self.push_list()
        self._extend(self.stack[-1], values)

    def make_dict(self) -> None:
        values = self._since_mark()
        self.push_dict()
        self._update(self.stack[-1], values)

    def append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def append_many(self) -> None:
        values = self._since_mark()
        self._extend(self.stack[-1], values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update(self.stack[-1], [key, value])

    def set_items(self) -> None:
        values = self._since_mark()
        self._update(self.stack[-1], values)

    def _extend(self, target: Any, values: list[Any]) -> None:
        if type(target) is Instance:
            if target.elements is None:
                target.elements = []
            target = target.elements
        if type(target) is not list:
            raise MalformedPickleError("it appends to what is no list")
        if len(target) + len(values) > MAX_SCALARS:
            kept = [value for value in values if type(value) not in SCALARS]
            self.num_dropped += len(values) - len(kept)
            values = kept
        self.memory += 40 * len(values)
        target.extend(values)

    def _update(self, target: Any, values: list[Any]) -> None:
        if len(values) % 2:
            raise MalformedPickleError("it has a key without a value")
        if type(target) is Instance:
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict and type(target) is not Ordered:
            raise MalformedPickleError("it puts keys into what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if len(target) >= MAX_SCALARS and type(value) in SCALARS:
                self.num_dropped += 1
                continue
            self.memory += 150
            target[as_key(key)] = value

    # Names, calls and state.

    def _named(self, module: Any, name: Any) -> Global:
        if type(module) is not str or type(name) is not str:
            raise MalformedPickleError("the name of a class in it is no text")
        module = _OLD_MODULES.get(module, module)
        found = self.globals.get((module, name))
        if found is None:
            self.memory += 200 + len(module) + len(name)
            found = self.globals[module, name] = Global(module, name)
        return found

    def push_global(self) -> None:
        module, name = self.line(), self.line()
        self.stack.append(self._named(module.decode("utf-8"), name.decode("utf-8")))

    def make_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._named(module, name))

    def push_extension(self, code: int) -> None:
        self.stack.append(self._named("copyreg.extension", str(code)))

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple:
            raise MalformedPickleError("it calls something with what are no arguments")
        self.memory += 120
        self.stack.append(self._rebuild(function, args))

    def _instance(self, cls: Any, args: Any, kwargs: Any = None) -> None:
        self.memory += 120
        self.stack.append(Instance(cls, args, kwargs))

    def new_object(self) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        self._instance(cls, args)

    def new_object_with_keywords(self) -> None:
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._instance(cls, args, kwargs)

    def instance_of_name(self) -> None:
        self.push_global()
        cls = self.stack.pop()
        self._instance(cls, tuple(self._since_mark()))

    def instance_since_mark(self) -> None:
        cls, *args = self._since_mark() or [None]
        if cls is None:
            raise IndexError
        self._instance(cls, tuple(args))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        # On anything else it would set attributes of a class or fail; the names are listed either way.
        if hasattr(type(target), "state"):
            target.state = state

    def push_persistent_line(self) -> None:
        self.memory += 120
        self.stack.append(self._persistent(lenient_text(self.line())))

    def make_persistent(self) -> None:
        self.memory += 120
        self.stack.append(self._persistent(self.stack.pop()))
