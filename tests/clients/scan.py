# SPDX-License-Identifier: Apache-2.0
"""What installed clients use of `deepspeed`, read from their sources without running them.

    python -m tests.clients.scan                      # every client that is installed
    python -m tests.clients.scan trl ./some/folder    # these; a folder is a package's source

prints what each client uses and this package lacks, and where clients compare versions. Three kinds of use are found:

- names: imports and attribute chains that start at an import of `deepspeed`, aliases followed within their scope;
- attributes by their look: `x.ds_*` and `x.zero_*`, and what is read of a variable called after an engine
  (`engine`, `deepspeed_engine`, `self.deepspeed`), by dot, getattr or hasattr, in files that mention deepspeed.
  What the client defines itself is its own;
- comparisons of the version.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CLIENTS = ("transformers", "accelerate", "trl", "peft", "lightning")
"""The packages that the integration tests run. Those that are not installed are left out."""

PREFIXES = ("ds_", "zero_")
ENGINES = re.compile(r"(?:\w*_)?(?:engine|deepspeed)$")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
REQUIREMENT = re.compile(r"deepspeed\s*(?:[<>=!~]=?)\s*\d[\w.]*$")


@dataclass(frozen=True, order=True)
class Use:
    """One place: ``what`` is a dotted name below `deepspeed`, an attribute, or the text of a comparison."""

    what: str
    where: str = field(compare=False)


@dataclass
class Uses:
    """All that one client uses, by kind."""

    names: set[Use] = field(default_factory=set)
    attributes: set[Use] = field(default_factory=set)
    of_engines: set[Use] = field(default_factory=set)
    versions: set[Use] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)


def installed(clients: Iterable[str] = CLIENTS) -> dict[str, Path]:
    """Client -> the folder of its source, for those that are installed or are folders."""
    found = {}
    for client in clients:
        if Path(client).is_dir():
            found[Path(client).resolve().name] = Path(client)
            continue
        spec = importlib.util.find_spec(client)
        if spec is not None and spec.submodule_search_locations:
            found[client] = Path(next(iter(spec.submodule_search_locations)))
    return found


def scan(folder: Path) -> Uses:
    """What the sources below ``folder`` use."""
    uses, own = Uses(), set[str]()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "deepspeed" not in text.lower():
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError as error:  # a template, or written for another Python
            uses.unread.append(f"{path.relative_to(folder)}: {error}")
            continue
        _Reader(uses, f"{folder.name}/{path.relative_to(folder).as_posix()}", text).read(tree)
        own |= _defined(tree)
    uses.attributes = {use for use in uses.attributes if use.what not in own}
    uses.of_engines = {use for use in uses.of_engines if use.what not in own}
    return uses


def _defined(tree: ast.AST) -> set[str]:
    """Attributes that a client gives to objects of its own: methods, fields, and what it sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def _bindings(scope: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(name, dotted path of what it is below deepspeed, or None for anything else) that a scope itself binds."""
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = scope.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            yield argument.arg, None
    for node in _inside(scope):
        if isinstance(node, ast.Import):
            for alias in node.names:
                ours = alias.name.split(".")[0] == "deepspeed"
                path = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or alias.name.split(".")[0], path if ours else None
        elif isinstance(node, ast.ImportFrom):
            ours = not node.level and (node.module or "").split(".")[0] == "deepspeed"
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}" if ours else None
        elif isinstance(node, SCOPES) and not isinstance(node, ast.Lambda):
            yield node.name, None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, None


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of scopes in it (which are yielded themselves)."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from _inside(child)


class _Reader:
    """Reads one file."""

    def __init__(self, uses: Uses, name: str, text: str) -> None:
        self.uses, self.name, self.text = uses, name, text
        self.scopes: list[dict[str, str | None]] = []
        self.texts: list[dict[str, str]] = []
        self.versions: set[str] = set()

    def read(self, tree: ast.AST) -> None:
        """Read a whole module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and self._is_version(node.value):
                self.versions |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self._scope(tree)

    def _scope(self, scope: ast.AST) -> None:
        names: dict[str, str | None] = {}
        for name, path in _bindings(scope):
            names[name] = path or names.get(name)  # one branch imports deepspeed's, the other a substitute
        self.scopes.append(names)
        self.texts.append({})
        for node in _inside(scope):
            if isinstance(node, ast.Assign):
                path = self._path(node.value)
                for target in (target.id for target in node.targets if isinstance(target, ast.Name)):
                    if path is not None:  # `zero = deepspeed.zero`
                        names[target] = path
                    if isinstance(node.value, ast.Constant):  # `minimum = "0.18.2"`
                        self.texts[-1][target] = repr(node.value.value).replace("'", '"')
        inner = [self._node(node) for node in self._outermost(scope)]
        for child in inner:
            if child is not None:
                self._scope(child)
        self.scopes.pop()
        self.texts.pop()

    def _outermost(self, scope: ast.AST) -> list[ast.AST]:
        """The nodes of a scope; of an attribute chain that starts at deepspeed only the whole."""
        found, parts = [], set()
        for node in _inside(scope):
            if id(node) in parts:
                continue
            if isinstance(node, ast.Attribute) and self._path(node) is not None:
                parts |= {id(part) for part in ast.walk(node)}
            found.append(node)
        return found

    def _node(self, node: ast.AST) -> ast.AST | None:
        """Record what a node uses; returns it where it is a scope of its own."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._record(self.uses.names, alias.name, node, alias.name.split(".")[0] == "deepspeed")
        elif isinstance(node, ast.ImportFrom):
            ours = not node.level and (node.module or "").split(".")[0] == "deepspeed"
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self._record(self.uses.names, str(name), node, ours)
        elif isinstance(node, ast.Attribute):
            path = self._path(node)
            self._record(self.uses.names, path or "", node, path is not None)
            if path is None and isinstance(node.ctx, ast.Load):
                self._attribute(node.value, node.attr, node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Compare) and any(self._is_version(side) for side in [node.left, *node.comparators]):
            self._version(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and REQUIREMENT.fullmatch(node.value):
            self._version(node)
        return node if isinstance(node, SCOPES) else None

    def _call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if called in ("getattr", "hasattr") and len(node.args) > 1 and texts:
            path = self._path(node.args[0])
            if path is None:
                self._attribute(node.args[0], texts[0], node)
            elif called == "getattr" and len(node.args) == 2:  # with a default, its absence is foreseen
                self._record(self.uses.names, f"{path}.{texts[0]}", node, True)
        elif called in ("import_module", "find_spec") and texts:
            self._record(self.uses.names, texts[0], node, texts[0].split(".")[0] == "deepspeed")
        elif "version" in called and texts and texts[0] == "deepspeed" and len(node.args) > 2:
            self._version(node)  # compare_versions("deepspeed", ">=", "0.14.4")

    def _attribute(self, of: ast.AST, attribute: str, node: ast.AST) -> None:
        last = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        self._record(self.uses.attributes, attribute, node, attribute.startswith(PREFIXES))
        self._record(self.uses.of_engines, attribute, node, ENGINES.fullmatch(last) is not None)

    def _path(self, node: ast.AST) -> str | None:
        """Dotted path of an expression that starts at an import of deepspeed, else None."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return base and f"{base}.{node.attr}"
        return None

    def _is_version(self, node: ast.AST) -> bool:
        """Whether an expression is, or is made from, the version of deepspeed."""
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr in ("__version__", "version"):
                if isinstance(part.value, ast.Name) and part.value.id == "deepspeed":
                    return True
            if isinstance(part, ast.Name) and part.id in self.versions:
                return True
            if isinstance(part, ast.Call) and len(part.args) == 1 and isinstance(part.args[0], ast.Constant):
                called = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
                if part.args[0].value == "deepspeed" and called == "version":
                    return True
        return False

    def _version(self, node: ast.AST) -> None:
        text = ast.get_source_segment(self.text, node) or ""
        for name, value in self.texts[-1].items():
            text = re.sub(rf"\b{name}\b", value, text)
        self._record(self.uses.versions, " ".join(text.split()), node, True)

    def _record(self, kind: set[Use], what: str, node: ast.AST, wanted: bool) -> None:
        if wanted:
            kind.add(Use(what, f"{self.name}:{getattr(node, 'lineno', 0)}"))


def exists(path: str) -> bool:
    """Whether a dotted path can be imported, its last parts as attributes. Looks no further than an object that has
    attributes only when it is made (a class's instance)."""
    parts = path.split(".")
    found: object = None
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def missing(uses: Uses) -> list[Use]:
    """The names among ``uses`` that this package lacks, sorted, each once."""
    return sorted({use for use in uses.names if not exists(use.what)})


def main(clients: list[str]) -> int:
    """Print what is missing and what is compared, client by client; returns how many names are missing."""
    count = 0
    for client, folder in installed(clients or CLIENTS).items():
        uses = scan(folder)
        print(f"{client}: {len({use.what for use in uses.names})} names")
        lacking = missing(uses)
        count += len(lacking)
        for path in uses.unread:
            print(f"  not read: {path}")
        for title, found in (
            ("missing", lacking),
            ("compares", sorted(uses.versions)),
            ("reads of parameters and optimizers", sorted(uses.attributes)),
            ("reads of engines", sorted(uses.of_engines)),
        ):
            for use in found:
                print(f"  {title}: {use.what}    ({use.where})")
    return count


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
