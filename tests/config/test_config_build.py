"""From an entry of the config to an object: whose fault each error is, and where it stands."""

# ruff: noqa: E501 - a table reads best with one case a line

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.config.build import UserCodeError, build, import_class
from ckptrun.config.load import load_config
from ckptrun.config.run_config import ClassSpec, RunConfig
from ckptrun.errors import ConfigError, MisconfigurationException

TASKS = """
from __future__ import annotations
import dataclasses, enum, pathlib
from typing import Any, Callable, Literal, Optional, Sequence, Union
from ckptrun.errors import MisconfigurationException

class Kind(enum.Enum):
    small = 1
    large = 2

@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    steps: int = 5

class Part:
    def __init__(self, width: int = 3, name: str = "part"):
        self.width, self.name = width, name

class WidePart(Part):
    def __init__(self, factor: float = 2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

class Base:
    def __init__(self, lr: float, hidden: Optional[int] = None, mode: Literal["min", "max"] = "min"):
        self.lr, self.hidden, self.mode = lr, hidden, mode

class Model(Base):
    def __init__(self, part: Part | None = None, parts: Sequence[Part] = (), kind: Kind = Kind.small,
                 path: pathlib.Path = pathlib.Path("."), settings: Settings = Settings(), free=None,
                 options: dict = {}, anything: dict[str, Any] = {}, sizes: list[int] = [1],
                 pair: tuple[int, float] = (1, 1.0), text: str = "", make: Callable[[int], Part] = Part,
                 later: "NotImported" = None, either: Union[int, str] = 1, **kwargs):
        super().__init__(**kwargs)
        self.__dict__.update({k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")})

class Open:
    def __init__(self, a: int, **kwargs):
        self.a, self.kwargs = a, kwargs

class Bare:
    pass

class Boom:
    def __init__(self, depth: int = 1):
        raise ValueError("no such depth")

class Leaves:
    def __init__(self):
        raise SystemExit(0)

class Refuses:
    def __init__(self):
        raise MisconfigurationException("monitor is missing")

class Holder:
    def __init__(self, part: Boom):
        self.part = part

class Outer:
    class Inner:
        pass

def function():
    pass
"""


@pytest.fixture(autouse=True)
def _own_modules(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test imports its own ``tasks`` from its own folder."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    (in_tmp_path / "tasks.py").write_text(TASKS)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(in_tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


Make = Callable[..., RunConfig]


@pytest.fixture
def config(in_tmp_path: Path) -> Make:
    def make(text: str, *overrides: str) -> RunConfig:
        (in_tmp_path / "c.yaml").write_text(text)
        return load_config(files=["c.yaml"], overrides=overrides)

    return make


def _built(config: RunConfig, notices: list[str] | None = None) -> Any:
    assert config.model is not None
    return build(config.model, config=config, notices=notices)


MODEL = """\
model:
  class_path: tasks.Model
  init_args:
    lr: 1e-3
"""


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lr=1", 1.0),
        ("lr='1e-3'", 1e-3),
        ("hidden=1e3", 1000),
        ("hidden=null", None),
        ("mode=max", "max"),
        ("text=007", "007"),
        ("text=on", "on"),
        ("sizes=[1e1, 2]", [10, 2]),
        ("pair=[1e1, 2]", (10, 2.0)),
        ("either='5'", "5"),
        ("either=5", 5),
        ("path=/x", Path("/x")),
        ("options={class_path: not.there, x: 1}", {"class_path": "not.there", "x": 1}),
        ("anything={a: 'b: c', d: 1e3}", {"a": "b: c", "d": 1000.0}),
        ("free='a: b'", "a: b"),
        ("free=[1, {x: 2}]", [1, {"x": 2}]),
        ("later=3", 3),
    ],
)
def test_arguments_arrive_as_the_class_types_them(config: Make, argument: str, value: Any) -> None:
    model = _built(config(MODEL, f"model.init_args.{argument}"))
    found = getattr(model, argument.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


def test_enums_and_dataclasses(config: Make) -> None:
    model = _built(
        config(MODEL, "model.init_args.kind=large", "model.init_args.settings={rate: 1, steps: 1e1}")
    )
    assert model.kind.name == "large"
    assert (model.settings.rate, model.settings.steps) == (1.0, 10)


def test_classes_within_arguments(config: Make) -> None:
    model = _built(
        config(
            MODEL
            + "    part: {class_path: tasks.WidePart, init_args: {width: 1e1, factor: 3}}\n"
            + "    parts: [{class_path: tasks.Part}, {class_path: tasks.WidePart, init_args: {name: x}}]\n"
            + "    make: {class_path: tasks.Part, init_args: {name: made}}\n"
            + "    free: [{class_path: tasks.Part, init_args: {width: 7}}, {k: {class_path: tasks.Part}}]\n"
            + "    anything: {p: {class_path: tasks.Part, init_args: {width: 8}}}\n"
        )
    )
    assert (model.part.width, model.part.factor) == (10, 3.0)
    assert [(part.width, part.name) for part in model.parts] == [(3, "part"), (3, "x")]
    assert (model.make(5).width, model.make(5).name) == (5, "made")
    assert model.free[0].width == 7
    assert model.free[1]["k"].width == 3
    assert model.anything["p"].width == 8


def test_keyword_arguments_are_followed_to_the_base(config: Make) -> None:
    assert _built(config(MODEL, "model.init_args.hidden=3")).hidden == 3


def test_a_class_that_takes_anything_gets_it(config: Make) -> None:
    model = _built(config("model: {class_path: tasks.Open, init_args: {a: 1, b: {c: 1e3}}}\n"))
    assert (model.a, model.kwargs) == (1, {"b": {"c": 1000.0}})


def test_without_arguments(config: Make) -> None:
    assert type(_built(config("model: tasks.Bare\n"))).__name__ == "Bare"
    assert type(_built(config("model: tasks.Outer.Inner\n"))).__name__ == "Inner"


def test_a_spec_alone_is_enough() -> None:
    assert build(ClassSpec("tasks.Part", {"width": 4})).width == 4


def test_a_mistyped_argument_of_a_callback_that_averages() -> None:
    for name, known in (("EMAWeightAveraging", "decay"), ("WeightAveraging", "avg_fn")):
        wrong = {"decay": "decai", "avg_fn": "avgfn"}[known]
        with pytest.raises(ConfigError, match=f"unknown argument '.*{wrong}' of {name}") as caught:
            build(ClassSpec(f"ckptrun.callbacks.{name}", {wrong: 0.9}))
        assert str(caught.value.hint).endswith(f"{known}?")


WRONG = [
    # overrides, message, hint
    (["model.init_args.hiden=3"], "override 'model.init_args.hiden=3': unknown argument 'model.init_args.hiden' of Model", "Did you mean model.init_args.hidden?"),
    (["model.init_args.zzz=3"], "unknown argument 'model.init_args.zzz' of Model", "Model takes part, parts, kind"),
    (["model.init_args={sizes: 3}"], "override 'model.init_args={sizes: 3}': model.init_args.sizes is 3, expected a list of a whole number", None),
    (["model.init_args.lr=fast"], "model.init_args.lr is 'fast', expected a number", None),
    (["model.init_args.mode=mid"], "model.init_args.mode is 'mid', expected one of min, max", None),
    (["model.init_args.hidden=1.5"], "model.init_args.hidden is 1.5, expected a whole number or null", None),
    (["model.init_args.kind=tiny"], "model.init_args.kind is 'tiny', expected Kind", "large"),
    (["model.init_args.settings={rat: 1}"], "model.init_args.settings is a mapping, expected Settings", "rat"),
    (["model.init_args.pair=[1]"], "model.init_args.pair is a list, expected tuple", None),
    (["model.init_args.part=tasks.Bare"], "model.init_args.part is 'tasks.Bare', expected Part or null", None),
    (["model.init_args.part={class_path: tasks.Bare}"], "model.init_args.part is tasks.Bare, expected Part", "not correspond to a subclass of Part"),
    (["model.init_args.part={class_path: tasks.Prat}"], "the module tasks has no class 'Prat'", "Did you mean tasks.Part?"),
    (["model.init_args.part={class_path: tasks.Part, init_args: {widht: 3}}"], "unknown argument 'model.init_args.part.init_args.widht' of Part", "Did you mean model.init_args.part.init_args.width?"),
    (["model.init_args.part={class_path: tasks.Part, init_args: {width: x}}"], "model.init_args.part.init_args.width is 'x', expected a whole number", None),
    (["model.init_args.parts=[{class_path: tasks.Part, init_args: {widht: 3}}]"], "'model.init_args.parts.0.init_args.widht'", None),
    (["model.init_args.free=[{class_path: tasks.Base}]"], "Base needs model.init_args.free.0.init_args.lr", None),
    (["model.init_args.free={class_path: nowhere.Base}"], "there is no module 'nowhere'", None),
    (["model.class_path=tasks.Base", "model.init_args={lr: null}"], "model.init_args.lr is nothing (null), expected a number", None),
    (["model.class_path=tasks.Bare", "model.init_args.x=1"], "unknown argument 'model.init_args.x' of Bare", "Bare takes no arguments."),
    (["model.class_path=tasks.Open"], "override 'model.class_path=tasks.Open': Open needs model.init_args.a, and nobody gives it", None),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message", "hint"), WRONG)
def test_wrong_arguments(config: Make, overrides: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        _built(config(MODEL, *overrides))
    assert message in caught.value.message
    assert hint is None or hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_the_line_of_an_argument_is_named(config: Make) -> None:
    with pytest.raises(ConfigError, match=r"^c.yaml:5: unknown argument 'model.init_args.hiden'"):
        _built(config(MODEL + "    hiden: 3\n"))
    with pytest.raises(ConfigError, match=r"^c.yaml:7: model.init_args.part.init_args.width is 'x'"):
        _built(
            config(MODEL + "    part:\n      class_path: tasks.Part\n      init_args: {width: x}\n"),
        )
    with pytest.raises(ConfigError, match=r"^c.yaml:2: Base needs model.init_args.lr"):
        _built(config("model:\n  class_path: tasks.Base\n"))


def test_everything_is_checked_before_anything_is_built(config: Make) -> None:
    text = "model: {class_path: tasks.Model, init_args: {lr: 1, free: {class_path: tasks.Boom}, text: [1]}}\n"
    with pytest.raises(ConfigError, match=r"model.init_args.text is a list, expected text"):
        _built(config(text))


def test_arguments_of_a_replaced_class_go_where_they_fit(config: Make) -> None:
    notices: list[str] = []
    model = _built(config(MODEL + "    text: x\n    hidden: 4\n", "model.class_path=tasks.Base"), notices)
    assert (model.lr, model.hidden) == (1e-3, 4)
    assert notices == ["model: Base takes no text, given for the class that it replaces"]


def test_a_replaced_class_within_arguments(config: Make) -> None:
    text = MODEL + "    part: {class_path: tasks.WidePart, init_args: {factor: 3, width: 5}}\n"
    notices: list[str] = []
    model = _built(config(text, "model.init_args.part.class_path=tasks.Part"), notices)
    assert (type(model.part).__name__, model.part.width) == ("Part", 5)
    assert notices == ["model.init_args.part: Part takes no factor, given for the class that it replaces"]


# --- whose fault it is ----------------------------------------------------------------------------


UNKNOWN = [
    ("tasks.Modle", "the module tasks has no class 'Modle'", "Did you mean tasks.Model?"),
    ("tasks.model", "the module tasks has no class 'model'", "Did you mean tasks.Model?"),
    ("task.Model", "there is no module 'task'", "Did you mean tasks.Model?"),
    ("tasks.gpt.Model", "there is no module 'tasks.gpt'", None),
    ("package.gtp.GPT", "there is no module 'package.gtp'", "Did you mean package.gpt?"),
    ("package.gpt.GTP", "the module package.gpt has no class 'GTP'", "Did you mean package.gpt.GPT?"),
    ("package.gpt.Zzzzzz", "the module package.gpt has no class 'Zzzzzz'", "Classes of package.gpt: GPT."),
    ("package.gpt", "package.gpt is a module, expected a class", "Write the class too: package.gpt.Class."),
    ("json", "class_path 'json' is no dotted name", None),
    ("json.decoder", "json.decoder is a module, expected a class", "Classes of json.decoder: JSONDecode"),
    ("tasks.function", "tasks.function is a function, expected a class", None),
    ("tasks.Outer.Iner", "tasks.Outer has no 'Iner'", "Did you mean tasks.Outer.Inner?"),
    ("ModelCheckpoint", "class_path 'ModelCheckpoint' is no dotted name", "Did you mean ckptrun.callbacks.ModelCheckpoint?"),
    ("GPT", "class_path 'GPT' is no dotted name", "Write the module too"),
    ("tasks..Model", "class_path 'tasks..Model' is no dotted name", None),
    ("tasks/model.py", "is no dotted name", None),
    ("ckptrun.callbacks.ModelCheckpoints", "has no class 'ModelCheckpoints'", "Did you mean ckptrun.callbacks.ModelCheckpoint?"),
    ("lightning_absent.callbacks.EarlyStopping", "there is no module 'lightning_absent'", "Did you mean ckptrun.callbacks.EarlyStopping?"),
]  # fmt: skip


@pytest.mark.parametrize(("class_path", "message", "hint"), UNKNOWN)
def test_unknown_classes(in_tmp_path: Path, class_path: str, message: str, hint: str | None) -> None:
    (in_tmp_path / "package").mkdir()
    (in_tmp_path / "package" / "__init__.py").write_text("")
    (in_tmp_path / "package" / "gpt.py").write_text("import os\nclass GPT: pass\n")
    with pytest.raises(ConfigError) as caught:
        import_class(class_path, place="c.yaml:2")
    assert caught.value.message.startswith("c.yaml:2: ")
    assert message in caught.value.message
    assert hint is None or hint in str(caught.value.hint)


def test_the_working_folder_comes_first(in_tmp_path: Path) -> None:
    (in_tmp_path / "colorsys.py").write_text("class Mine: pass\n")
    sys.modules.pop("colorsys", None)
    assert import_class("colorsys.Mine", place=None).__name__ == "Mine"
    assert import_class("collections.OrderedDict", place=None).__name__ == "OrderedDict"
    assert sys.path.count(str(in_tmp_path)) == 1


def test_a_class_of_another_kind(config: Make) -> None:
    tasks_base = import_class("tasks.Base", place=None)
    with pytest.raises(ConfigError, match=r"c.yaml:2: tasks.Part is not a subclass of tasks.Base"):
        import_class("tasks.Part", place="c.yaml:2", base=tasks_base)
    assert import_class("tasks.Model", place=None, base=tasks_base).__name__ == "Model"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import not_installed_here\n", ModuleNotFoundError),
        ("from tasks import missing\n", ImportError),
        ("import broken_too.sub\n", ModuleNotFoundError),
        ("x = 1 / 0\n", ZeroDivisionError),
        ("def f(:\n", SyntaxError),
        ("import sys\nsys.exit(0)\n", SystemExit),
    ],
)
def test_a_module_that_raises_is_the_users(
    in_tmp_path: Path, source: str, error: type[BaseException]
) -> None:
    (in_tmp_path / "broken.py").write_text("# first line\n" + source)
    with pytest.raises(UserCodeError) as caught:
        import_class("broken.Model", place="c.yaml:2")
    assert type(caught.value.original) is error
    assert caught.value.exit_code == 1
    assert caught.value.doing == "importing the module broken"
    shown = "".join(traceback.format_exception(caught.value.original, chain=False))
    assert "broken.py" in shown
    assert "importlib" not in shown
    assert "ckptrun" not in shown


@pytest.mark.parametrize(
    ("text", "error", "doing"),
    [
        ("model: tasks.Boom\n", ValueError, "building model (Boom)"),
        ("model: tasks.Leaves\n", SystemExit, "building model (Leaves)"),
        (
            "model: {class_path: tasks.Holder, init_args: {part: {class_path: tasks.Boom}}}\n",
            ValueError,
            "building model.init_args.part",
        ),
    ],
)
def test_an_init_that_raises_is_the_users(
    config: Make, text: str, error: type[BaseException], doing: str
) -> None:
    with pytest.raises(UserCodeError) as caught:
        _built(config(text))
    assert type(caught.value.original) is error
    assert caught.value.doing == doing
    shown = "".join(traceback.format_exception(caught.value.original))
    assert "tasks.py" in shown
    assert "build.py" not in shown
    assert "jsonargparse" not in shown


def test_a_users_own_refusal_goes_through(config: Make) -> None:
    with pytest.raises(MisconfigurationException, match="monitor is missing"):
        _built(config("model: tasks.Refuses\n"))


def test_an_unreadable_annotation_is_left_to_python(in_tmp_path: Path) -> None:
    (in_tmp_path / "odd.py").write_text(
        "class Odd:\n    def __init__(self, x: 'Missing', y: 'int' = 1, *args, **kwargs):\n        self.x, self.y = x, y\n"
    )
    odd = build(ClassSpec("odd.Odd", {"x": 3, "y": "1e1"}))
    assert (odd.x, odd.y) == (3, 10)


def test_classes_made_in_c() -> None:
    assert build(ClassSpec("collections.OrderedDict", {"a": 1})) == {"a": 1}
