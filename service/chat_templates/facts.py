"""Facts read from the source of a chat template: the roles that it names, and whether it uses tools."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from jinja2 import nodes

_SAME = frozenset({"==", "eq", "equalto", "in"})
"""Jinja's tests that compare a value with constants."""
_SELECTS = frozenset({"selectattr", "rejectattr"})


class TemplateFacts:
    """Facts of one template's syntax tree."""

    def __init__(self, tree: nodes.Template) -> None:
        constants = (constant.value for constant in tree.find_all(nodes.Const))
        self.words = frozenset(constant for constant in constants if isinstance(constant, str))
        """Its text constants, which include the reasons that it may refuse messages with."""
        self.names = self.words | {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
        """The names that it may look up in a message."""
        names = tree.find_all(nodes.Name)
        self.shows_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        """Whether it uses ``tools``."""
        self.roles = _Field(tree, "role").compared_with()
        """The roles that it names: constants that it compares with a message's role, or looks up by one."""
        self.tests_content_for_none = _Field(tree, "content").is_tested_for_none()
        """Whether it treats a message whose content is None differently from one without content."""


class _Field:
    """A field of messages in a template: finds where it is used, under any name."""

    def __init__(self, tree: nodes.Template, name: str) -> None:
        self._tree = tree
        self._name = name
        self._assigned: dict[str, list[nodes.Node]] = defaultdict(list)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._assigned[assignment.target.name].append(assignment.node)
        self._aliases: set[str] = set()
        while found := {name for name in self._assigned if name not in self._aliases and self._is_alias(name)}:
            self._aliases |= found

    def compared_with(self) -> frozenset[str]:
        """Returns the constants that its value is compared with, or looked up in."""
        found: set[str] = set()
        for compare in self._tree.find_all(nodes.Compare):
            operands = [compare.expr, *(operand.expr for operand in compare.ops)]
            if any(map(self._is_value, operands)):
                found.update(self._constants(operands))
        for test in self._tree.find_all(nodes.Test):
            if test.name in _SAME and self._is_value(test.node):
                found.update(self._constants(test.args))
        for lookup in self._tree.find_all(nodes.Getitem):
            if self._is_value(lookup.arg):
                found.update(self._constants([lookup.node]))
        for selection in self._tree.find_all(nodes.Filter):
            if selection.name in _SELECTS and selection.args and self._is_name(selection.args[0]):
                found.update(self._constants(selection.args[2:]))
        return frozenset(found)

    def is_tested_for_none(self) -> bool:
        for test in self._tree.find_all(nodes.Test):
            if test.name == "none" and self._is_value(test.node):
                return True
        for compare in self._tree.find_all(nodes.Compare):
            operands = [compare.expr, *(operand.expr for operand in compare.ops)]
            has_none = any(isinstance(each, nodes.Const) and each.value is None for each in operands)
            if has_none and any(map(self._is_value, operands)):
                return True
        return False

    def _is_alias(self, name: str) -> bool:
        return any(map(self._is_value, self._assigned[name]))

    def _is_name(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Const) and node.value == self._name

    def _is_value(self, node: nodes.Node | None) -> bool:
        """Returns whether an expression's value is that of the field, unchanged or slightly changed."""
        match node:
            case nodes.Name():
                return node.name in self._aliases
            case nodes.Getattr():
                return node.attr == self._name
            case nodes.Getitem():
                return self._is_name(node.arg)
            case nodes.Filter():
                return self._is_value(node.node)
            case nodes.Call(node=nodes.Getattr(attr="get")):
                return any(map(self._is_name, node.args[:1]))
            case nodes.Call(node=nodes.Getattr(node=changed)):
                return self._is_value(changed)
            case nodes.CondExpr():
                return self._is_value(node.expr1) or self._is_value(node.expr2)
            case nodes.BinExpr():
                return node.operator in ("and", "or") and (self._is_value(node.left) or self._is_value(node.right))
        return False

    def _constants(self, expressions: Iterable[nodes.Node]) -> Iterator[str]:
        """Yields the texts that expressions consist of, and the keys of objects."""
        for node in expressions:
            match node:
                case nodes.Const(value=str()):
                    yield node.value
                case nodes.List() | nodes.Tuple():
                    yield from self._constants(node.items)
                case nodes.Dict():
                    yield from self._constants(pair.key for pair in node.items)
                case nodes.Name():
                    literals = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Const)
                    assigned = self._assigned.get(node.name, ())
                    yield from self._constants(each for each in assigned if isinstance(each, literals))
