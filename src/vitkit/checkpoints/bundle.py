"""The source of a model in one file: what its classes need of vitkit, each definition as it is written there.

From a class all names that it uses are followed through the imports. What is not reached is left out: other
definitions, methods that nobody calls, and rows of tables for parts that the model does not have. Of two definitions
with one name the second gets the name of its module too. What remains is text cut out of our files, with its comments.

A definition here is a statement of a module; `Key` is the module and the name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path

from torch import nn

from vitkit.errors import CheckpointError

Key = tuple[str, str]
Edit = tuple[int, int, bytes]  # from byte, to byte: what comes there
_PACKAGE = "vitkit"
_KEPT_METHODS = frozenset(dir(nn.Module))  # what PyTorch calls by itself


class Source:
    """A module of vitkit: its text, what it defines and what it imports."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        self.text = Path(found.origin).read_bytes()
        self.tree = ast.parse(self.text)
        self.lines = [0]
        for line in self.text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    @cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        """Name -> the statements that make it: `X = {}` and `X["a"] = 1` both make X."""
        found: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self.tree.body:
            for name in _bound(statement):
                found[name].append(statement)
        return dict(found)

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Name here -> module and name there; "" for the module itself."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                found |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                found |= {a.asname or a.name.partition(".")[0]: (a.name, "") for a in node.names}
        return found

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def whole(self, node: ast.stmt) -> tuple[int, int]:
        """With its decorators and the comments right above, to the end of its last line."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        while first > 1 and self.text[self.lines[first - 2] : self.lines[first - 1]].lstrip().startswith(b"#"):
            first -= 1
        assert node.end_lineno is not None
        return self.lines[first - 1], self.lines[node.end_lineno]


@cache
def source(name: str) -> Source:
    return Source(name)


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        inner = target.value if isinstance(target, ast.Subscript) else target
        yield from (n.id for n in ast.walk(inner) if isinstance(n, ast.Name)) if inner is not None else ()


@cache
def resolve(module: str, name: str) -> Key | tuple[None, str] | None:
    """Where a name of a module is defined in vitkit; (None, line) for an import from elsewhere; None: nowhere."""
    here = source(module)
    if name in here.definitions:
        return module, name
    if name not in here.imports:
        return None
    there, original = here.imports[name]
    if there.partition(".")[0] == _PACKAGE:
        return resolve(there, original) if original else None
    if original:
        return None, f"from {there} import {original}" + (f" as {name}" if name != original else "")
    return None, f"import {there}" + (f" as {name}" if name != there.partition(".")[0] else "")


class Bundle:
    """What a model needs: found from `roots`, for a model that has parts of the classes `used` and no others."""

    def __init__(self, roots: Iterable[Key], used: Iterable[type]) -> None:
        self.roots, self.used = list(roots), {(cls.__module__, cls.__name__) for cls in used}
        self.parts = {key for key in self.used if key[0].partition(".")[0] == _PACKAGE}
        self.needed: set[Key] = set()
        self.outside: set[str] = set()
        self.attributes: set[str] = set()
        before = -1
        while before != (before := len(self.needed) + len(self.attributes)):  # a method that is called calls others
            self._follow()

    def _follow(self) -> None:
        todo, seen = [*self.roots], set[Key]()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            module = source(key[0])
            for statement in module.definitions[key[1]]:
                for node in self.kept_nodes(statement, key[0]):
                    if isinstance(node, ast.Attribute):
                        self.attributes.add(node.attr)
                    elif isinstance(node, ast.Name):
                        todo += self._found(key[0], node.id)
        self.needed |= seen

    def _found(self, module: str, name: str) -> list[Key]:
        there = resolve(module, name)
        if there is None:
            if name in source(module).imports:
                raise CheckpointError(f"{module} uses {name} as a whole, which one file cannot hold: a defect here")
            return []
        if there[0] is None:
            self.outside.add(there[1])
            return []
        return [there]

    def kept_nodes(self, node: ast.AST, module: str) -> Iterator[ast.AST]:
        """The nodes of a statement without methods that nobody calls, rows of absent parts and their annotations."""
        dropped = self.dropped(node, module)
        if node in dropped:
            return
        yield node
        for child in ast.iter_child_nodes(node):
            if child not in dropped:
                yield from self.kept_nodes(child, module)

    def dropped(self, node: ast.AST, module: str) -> set[ast.AST]:
        """Of the children of a node: methods, the keys and values of rows, annotations."""
        found: set[ast.AST] = set()
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {one for one in methods if not self._called(one.name) or _needs_package(one, module)}
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and self.is_absent(value, module):
                    found |= {key, value}
        for annotation in _annotations(node):
            if self.is_absent(annotation, module):
                found.add(annotation)
        return found

    def _called(self, name: str) -> bool:
        return name.startswith("__") or name in self.attributes or name in _KEPT_METHODS

    def is_absent(self, node: ast.expr, module: str) -> bool:
        """Whether it names a part of models that this model does not have."""
        names = (resolve(module, n.id) for n in ast.walk(node) if isinstance(n, ast.Name))
        return any(key is not None and key[0] is not None and _is_part(*key) and key not in self.parts for key in names)

    # --- the text -------------------------------------------------------------------------------------------

    def text(self) -> str:
        modules = self._in_order()
        renamed = self._renamed(modules)
        pieces = [piece for module in modules for piece in self._pieces(module, renamed)]
        return "\n".join([*_import_lines(self.outside), "", "", *pieces])

    def _in_order(self) -> list[str]:
        """The modules that are needed, each after those it imports."""
        order: list[str] = []
        wanted = {module for module, _ in self.needed}

        def visit(module: str, above: tuple[str, ...]) -> None:
            if module in order or module in above:
                return
            for there, original in source(module).imports.values():
                if there.partition(".")[0] == _PACKAGE and original:
                    visit(there, (*above, module))
            order.append(module)

        for module in sorted(wanted):
            visit(module, ())
        return [module for module in order if module in wanted]

    def _renamed(self, modules: list[str]) -> dict[Key, str]:
        """The first of several definitions of a name keeps it."""
        by_name: dict[str, list[str]] = defaultdict(list)
        for module, name in self.needed:
            by_name[name].append(module)
        again = {name: sorted(where, key=modules.index)[1:] for name, where in by_name.items()}
        return {(m, name): f"{name}_{m.rpartition('.')[2]}" for name, where in again.items() for m in where}

    def _pieces(self, module: str, renamed: Mapping[Key, str]) -> Iterator[str]:
        here = source(module)
        yield _title(here)
        first, apart = True, False  # two empty lines before and after a class or a function, as they were
        for statement in here.tree.body:
            if not any((module, name) in self.needed for name in _bound(statement)):
                continue
            start, end = here.whole(statement)
            text = here.text[start:end]
            for a, b, new in sorted(set(self._edits(here, statement, renamed)), reverse=True):
                text = text[: a - start] + new + text[b - start :]
            large = isinstance(statement, (ast.ClassDef, ast.FunctionDef))
            yield ("\n\n" if apart or (large and not first) else "") + text.decode().rstrip()
            apart, first = large, False
        yield "\n"

    def _edits(self, here: Source, statement: ast.stmt, renamed: Mapping[Key, str]) -> Iterator[Edit]:
        gone: list[tuple[int, int]] = []
        for node in _with_scope(statement):
            for child in self.dropped(node.node, here.name) if not _inside(here, node.node, gone) else ():
                if isinstance(child, ast.FunctionDef):
                    start, end = here.whole(child)
                    while here.text[end : end + 1] == b"\n":  # and the empty lines after it
                        end += 1
                    gone.append((start, end))
                    yield start, end, b""
                elif isinstance(node.node, ast.Dict):
                    index = next((i for i, key in enumerate(node.node.keys) if key is child), None)
                    if index is not None:
                        start, end = _row(here, node.node.keys[index], node.node.values[index])
                        gone.append((start, end))
                        yield start, end, b""
                elif isinstance(child, ast.expr):
                    start, end = here.span(child)
                    gone.append((start, end))
                    yield start, end, self._without_absent(here, child).encode()
        for node in _with_scope(statement):
            if not _inside(here, node.node, gone):
                yield from _rename(here, node, renamed)

    def _without_absent(self, here: Source, annotation: ast.expr) -> str:
        """`A | B | None` without what is absent; `object` when nothing is left."""
        if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            sides = [self._without_absent(here, side) for side in (annotation.left, annotation.right)]
            return " | ".join(side for side in sides if side != "object") or "object"
        if self.is_absent(annotation, here.name):
            return "object"
        start, end = here.span(annotation)
        return here.text[start:end].decode()


class _Scoped:
    def __init__(self, node: ast.AST, local: frozenset[str]) -> None:
        self.node, self.local = node, local


def _with_scope(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[_Scoped]:
    """Every node, with the names that are local where it is."""
    yield _Scoped(node, local)
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        given = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        local = local | given | stored
    elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
        local = local | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for child in ast.iter_child_nodes(node):
        yield from _with_scope(child, local)


def _rename(here: Source, scoped: _Scoped, renamed: Mapping[Key, str]) -> Iterator[Edit]:
    node = scoped.node
    if isinstance(node, ast.Name) and node.id not in scoped.local:
        key = resolve(here.name, node.id)
        if key is not None and key[0] is not None and (new := renamed.get(key, key[1])) != node.id:
            yield (*here.span(node), new.encode())
    elif node in here.tree.body and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        word = b"class " if isinstance(node, ast.ClassDef) else b"def "
        start = here.text.index(word, here.span(node)[0]) + len(word)
        yield start, start + len(node.name.encode()), renamed.get((here.name, node.name), node.name).encode()


def _inside(here: Source, node: ast.AST, gone: list[tuple[int, int]]) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)):
        return False
    start, end = here.span(node)
    return any(a <= start and end <= b for a, b in gone)


def _title(here: Source) -> str:
    """Name and first line of a module, and its legend of letters."""
    first, *paragraphs = (ast.get_docstring(here.tree) or "").split("\n\n")
    legend = [f"# {line}" for text in paragraphs if text.startswith("Shapes:") for line in text.splitlines()]
    name = here.name.partition(".")[2].replace(".", "/")
    return "\n".join([f"# --- {name}.py ".ljust(119, "-"), *(f"# {line}" for line in first.splitlines()), *legend, ""])


def _row(here: Source, key: ast.expr | None, value: ast.expr) -> tuple[int, int]:
    """With its comma, and its line where it has one of its own."""
    assert key is not None
    start, end = here.span(key)[0], here.span(value)[1]
    if here.text[end : end + 1] == b",":
        end += 1
    line = here.text.rfind(b"\n", 0, start) + 1
    if not here.text[line:start].strip():
        return line, here.text.index(b"\n", end) + 1
    while here.text[end : end + 1] == b" ":
        end += 1
    return start, end


def _needs_package(node: ast.AST, module: str) -> bool:
    """Whether it calls the public functions, `vitkit.predict`, which one file cannot hold."""
    imports = source(module).imports
    return any(isinstance(n, ast.Name) and imports.get(n.id) == (_PACKAGE, "") for n in ast.walk(node))


def _annotations(node: ast.AST) -> list[ast.expr]:
    """Of functions and variables; those of dataclasses are read when the program runs, but name no parts of models."""
    if isinstance(node, ast.FunctionDef):
        return [] if node.returns is None else [node.returns]
    if isinstance(node, ast.arg):
        return [] if node.annotation is None else [node.annotation]
    return [node.annotation] if isinstance(node, ast.AnnAssign) else []


@cache
def _is_part(module: str, name: str) -> bool:
    if not module.startswith(f"{_PACKAGE}.model."):
        return False
    found = getattr(importlib.import_module(module), name, None)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _import_lines(lines: set[str]) -> list[str]:
    """Sorted and joined: one line for each module."""
    names: dict[str, list[str]] = defaultdict(list)
    plain = []
    for line in lines:
        module, _, name = line.removeprefix("from ").partition(" import ")
        if line.startswith("from "):
            names[module].append(name)
        else:
            plain.append(line)
    joined = [f"from {module} import {', '.join(sorted(found))}" for module, found in names.items()]
    return ["from __future__ import annotations", "", *sorted(plain), *sorted(joined)]
