"""Writes the blocking classes of the client from the asyncio ones: `make blocking`.

Names, parameters, types, defaults and documentation are taken over, so that editors and mypy see
every signature, and nobody keeps two copies of it by hand. `--check` only tells whether the files
are up to date. Every public name of an asyncio class is taken over: they have none for the inside.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "src" / "magnetar" / "client" / "blocking"
PACKAGE: Final = "magnetar.client"

CLASSES: Final = {
    "transactions": ("transaction.transaction", "Transaction"),
    "groups": ("transaction.group", "TransactionGroup"),
    "producer": ("produce.producer", "Producer"),
    "consumer": ("consume.consumer", "Consumer"),
    "queue_consumer": ("consume.queue", "QueueConsumer"),
    "stream_consumer": ("consume.stream", "StreamConsumer"),
    "checkpoint_consumer": ("consume.checkpoint", "CheckpointConsumer"),
    "reader": ("consume.reader", "Reader"),
    "ranges": ("ranges.ranges", "Ranges"),
    "client": ("client", "Client"),
}
"""The file of a blocking class, then the asyncio module and class that it is written from."""

HANDLES: Final = {name: f"{PACKAGE}.blocking.{file}" for file, (_, name) in CLASSES.items()}
FROM_BASE: Final = {"close"}
TRANSACTIONS: Final = {"Transaction", "Beginning"}
"""What is a `Transaction` on the blocking side; one that is begun at once."""

HEADER: Final = '''"""Blocking: {what}.

Written by `make blocking` from `{module}`; edit that.
"""

from __future__ import annotations

'''


@dataclass
class Source:
    """A module, and where the names in it come from."""

    name: str
    syntax: ast.Module
    imports: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Source:
        path = ROOT / "src" / Path(*name.split(".")).with_suffix(".py")
        source = cls(name, ast.parse(path.read_text("utf-8")))
        for node in source.syntax.body:
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                for alias in node.names:
                    source.imports[alias.name] = f"from {node.module} import {alias.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef):
                for defined in _names_of(node):
                    source.imports[defined] = f"from {name} import {defined}"
        return source

    def class_named(self, name: str) -> ast.ClassDef:
        return next(
            node
            for node in self.syntax.body
            if isinstance(node, ast.ClassDef) and node.name == name
        )


def _names_of(node: ast.Assign | ast.AnnAssign | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


class Types(ast.NodeTransformer):
    """The types of the blocking side."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) == "asyncio.Future":
            return ast.Name("Future")
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "AsyncGenerator" and isinstance(node.slice, ast.Tuple):
            return ast.Subscript(ast.Name("Iterator"), self.visit(node.slice.elts[0]))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("Transaction") if node.id in TRANSACTIONS else node


class Writer:
    """Writes one class."""

    def __init__(self, module: str, name: str) -> None:
        self.module = f"{PACKAGE}.{module}"
        self.name = name
        self.imports: set[str] = set()
        self.guarded: set[str] = set()
        """What is imported for types only: it may not be installed."""
        self.variables: set[str] = set()

    def text(self) -> str:
        found: type[Any] = getattr(importlib.import_module(self.module), self.name)
        pieces: list[str] = []
        written: set[str] = set()
        for kind in found.__mro__:
            if not kind.__module__.startswith(f"{PACKAGE}."):
                continue
            source = Source.of(kind.__module__)
            methods = _methods(source.class_named(kind.__name__))
            new = [node for node in methods if node.name not in written]
            pieces += [piece for node in new if (piece := self.method(node, source))]
            written |= {node.name for node in new}
        source = Source.of(self.module)
        head = self._class_head(found, source.class_named(self.name))
        body = head + "\n\n".join(indent(piece, "    ") for piece in pieces) + "\n"
        variables = "".join(f'{each} = TypeVar("{each}")\n' for each in sorted(self.variables))
        if self.variables:
            self.imports.add("from typing import TypeVar")
        if self.guarded:
            self.imports.add("from typing import TYPE_CHECKING")
            variables = f"if TYPE_CHECKING:\n    {', '.join(self.guarded)}\n\n{variables}"
        what = f"`{self.name}`, for threads"
        header = HEADER.format(what=what, module=self.module)
        return f"{header}{chr(10).join(sorted(self.imports))}\n\n{variables}\n\n{body}"

    def _class_head(self, found: type[Any], node: ast.ClassDef) -> str:
        self.imports.add(f"from {self.module} import {self.name} as Async{self.name}")
        parameters = getattr(found, "__parameters__", ())
        wrapped, bases = f"Async{self.name}", ""
        if parameters:
            variable = parameters[0].__name__
            self.variables.add(variable)
            self.imports.add("from typing import Generic")
            wrapped, bases = f"{wrapped}[{variable}]", f", Generic[{variable}]"
        base = "Handle" if hasattr(found, "close") else "Threaded"
        if self.name == "Client":
            base = "Root"
        self.imports.add(f"from {PACKAGE}.blocking.handle import {base}")
        return f"class {self.name}({base}[{wrapped}]{bases}):\n{_doc(node, '    ')}\n"

    # --- methods

    def method(self, node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> str | None:
        decorators = {ast.unparse(each) for each in node.decorator_list}
        if node.name == "__aiter__":
            return self._iteration(node, source)
        if node.name == "__init__" and self.name == "Client":
            return self._client_init(node, source)
        if node.name == "_leave":
            return self._leaving()
        if node.name.startswith("_") or node.name in FROM_BASE:
            return None
        signature = self._signature(node, source)
        if "overload" in decorators:
            self.imports.add("from typing import overload")
            return f"@overload\n{signature} ..."
        called = f"self._wrapped.{node.name}"
        if "property" in decorators:
            return f"@property\n{signature}\n{_doc(node)}    return self._call(lambda: {called})\n"
        lines = [*self._evaluated(node), self._body(node, called)]
        return f"{signature}\n{_doc(node)}{indent(chr(10).join(lines), '    ')}\n"

    @staticmethod
    def _evaluated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        """What is run through must be so in the thread of the caller."""
        given = [*node.args.args, *node.args.kwonlyargs]
        many = [each for each in given if _type_of(each).startswith("Iterable[")]
        return [f"given = [wrapped_of(each) for each in {each.arg}]" for each in many]

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef, called: str) -> str:
        made = f"lambda: {called}({self._arguments(node)})"
        returns = ast.unparse(node.returns) if node.returns else "None"
        bare = returns.partition("[")[0]
        waits = "_wait" if isinstance(node, ast.AsyncFunctionDef) else "_call"
        if bare == "Beginning":
            return f"return Transaction(self._thread, self._wait({made}))"
        if bare in HANDLES:
            return f"return {bare}(self._thread, self.{waits}({made}))"
        if bare == "AsyncGenerator":
            return f"return self._pull({made})"
        if bare == "asyncio.Future":
            return f"return self._stored_later({made})"
        if bare == "Acknowledged":
            return f"return self._acknowledged({made})"
        return f"{'' if returns == 'None' else 'return '}self.{waits}({made})"

    def _client_init(self, node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> str:
        signature = self._signature(node, source)
        made = f"lambda: AsyncClient({self._arguments(node)})"
        return f"{signature}\n{_doc(node)}    super().__init__({made})\n"

    def _iteration(self, node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> str:
        assert node.returns is not None
        returned = ast.unparse(node.returns).replace("AsyncIterator", "Iterator")
        self.imports.add("from collections.abc import Iterator")
        self._import_names(ast.parse(returned), source)
        doc = '    """The messages, until it is closed."""\n'
        return (
            f"def __iter__(self) -> {returned}:\n{doc}"
            "    return self._iterate(lambda: self._wrapped.__aiter__())\n"
        )

    def _signature(self, node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> str:
        types = Types()
        arguments = types.visit(deepcopy(node.args))
        returns = types.visit(deepcopy(node.returns)) if node.returns else None
        self._import_names(arguments, source)
        if returns is not None:
            self._import_names(returns, source)
        returned = "None" if returns is None else ast.unparse(returns)
        return f"def {node.name}({ast.unparse(arguments)}) -> {returned}:"

    def _leaving(self) -> str:
        self.imports.add("from types import TracebackType")
        kinds = "kind: type[BaseException] | None, error: BaseException | None"
        return (
            f"def __exit__(self, {kinds}, trace: TracebackType | None) -> None:\n"
            "    self._wait(lambda: self._wrapped._leave(error))\n"
        )

    def _arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        given = [self._argument(each) for each in node.args.args[1:]]
        given += [f"{each.arg}={self._argument(each)}" for each in node.args.kwonlyargs]
        if node.args.kwarg is not None:
            given.append(f"**{node.args.kwarg.arg}")
        return ", ".join(given)

    def _argument(self, argument: ast.arg) -> str:
        kind = _type_of(argument)
        is_transaction = any(each in kind for each in TRANSACTIONS)
        if is_transaction or kind.startswith("Iterable["):
            self.imports.add(f"from {PACKAGE}.blocking.handle import wrapped_of")
        if kind.startswith("Iterable["):
            return "given"
        return f"wrapped_of({argument.arg})" if is_transaction else argument.arg

    def _import_names(self, tree: ast.AST, source: Source) -> None:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name):
                continue
            name = node.id
            if name in HANDLES:
                if name != self.name:
                    self.imports.add(f"from {HANDLES[name]} import {name}")
            elif name == "Iterator":
                self.imports.add("from collections.abc import Iterator")
            elif name == "Future":
                self.imports.add("from concurrent.futures import Future")
            elif name == "Acknowledged":
                self.imports.add(f"from {PACKAGE}.blocking.handle import Acknowledged")
            elif name == "pa":
                self.guarded.add("import pyarrow as pa")
            elif name in source.imports:
                self._import(name, source.imports[name])

    def _import(self, name: str, line: str) -> None:
        if name in {"T", "Value"}:
            self.variables.add(name)
        elif name != "AsyncIterator":
            self.imports.add(line)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _type_of(argument: ast.arg) -> str:
    return "" if argument.annotation is None else ast.unparse(argument.annotation)


def _doc(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, by: str = "    ") -> str:
    text = ast.get_docstring(node)
    if text is None:
        return ""
    text = re.sub(r"await (\w+\.ack\w*\(.*\))", r"\1.wait()", text)
    text = text.replace("async with await ", "with ").replace("async ", "").replace("await ", "")
    return indent(f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""', by) + "\n"


def _formatted(text: str, path: Path) -> str:
    ruff = str(Path(sys.executable).with_name("ruff"))
    for arguments in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [ruff, *arguments, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = []
    for file, (module, name) in CLASSES.items():
        path = TARGET / f"{file}.py"
        text = _formatted(Writer(module, name).text(), path)
        if is_check and (not path.exists() or path.read_text("utf-8") != text):
            stale.append(path.name)
        elif not is_check:
            path.write_text(text, "utf-8")
    if stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run `make blocking`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
