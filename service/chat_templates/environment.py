"""The Jinja environment of chat templates: transformers' filters, tags and functions, in a sandbox, with text that
remembers which parts the template itself wrote."""

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.service.chat_templates.text import concat, own_text


class TemplateRefusal(Exception):
    """A template called ``raise_exception``, with this text."""


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Marks a template's constants as its own text."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own_text({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own_text({''.join(group)!r})"


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one template. It keeps that template's constants."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # it would fold constants into lists, whose texts would not be marked
        )
        self.own_text = cache(own_text)
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model was trained on; it has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns only the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Returns plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    """Jinja's filter, with an empty separator that keeps the origin of the joined texts."""
    return jinja2.filters.sync_do_join(context, value, d or own_text(""), attribute)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))
