"""Text that remembers what a template wrote: it is what ``str`` gives, and no caller's character is the template's."""

import jinja2.sandbox
import pytest
from hypothesis import given, settings, strategies as st

from penstock.service.chat_templates.environment import TemplateEnvironment
from penstock.service.chat_templates.text import TemplateText, concat, own_text, runs

words = st.text(alphabet="aA ß\n,<", max_size=8)
# Capital letters are the template's, others a caller's: no operation below changes a letter's case.
mixed = st.lists(st.tuples(st.text("AB,- \n", max_size=4), st.text("ab,- \n", max_size=4)), max_size=4).map(
    lambda pairs: concat(piece for own, other in pairs for piece in (own_text(own), other)) or own_text("")
)
OPERATIONS = {
    "split": lambda text, a, b, n: text.split(a or None, n),
    "rsplit": lambda text, a, b, n: text.rsplit(a or None, n),
    "splitlines": lambda text, a, b, n: text.splitlines(n > 0),
    "partition": lambda text, a, b, n: text.partition(a or ","),
    "rpartition": lambda text, a, b, n: text.rpartition(a or ","),
    "strip": lambda text, a, b, n: [text.strip(a or None), text.lstrip(a or None), text.rstrip(a or None)],
    "replace": lambda text, a, b, n: [text.replace(a, b, n)],
    "removes": lambda text, a, b, n: [text.removeprefix(a), text.removesuffix(a)],
    "slices": lambda text, a, b, n: [text[n:], text[:n], text[::-1], text[n : n + 2]],
    "adds": lambda text, a, b, n: [text + a, a + text, text * max(0, n), 2 * text],
    "join": lambda text, a, b, n: [text.join([a, b]), text.join([]), text.join([a])],
    "formats": lambda text, a, b, n: [(text + "%s" + text) % a, (text + "%s|%s") % (a, b)],
    "iterates": lambda text, a, b, n: list(text),
}


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=50, deadline=None)
@given(text=mixed, a=st.text("ab,- ", max_size=2), b=st.text("ab", max_size=2), n=st.integers(-1, 4))
def test_an_operation_gives_what_str_gives_and_keeps_the_origins(name, text, a, b, n):
    operation = OPERATIONS[name]
    made = operation(text, a, b, n)
    assert list(made) == list(operation(str.__str__(text), a, b, n))
    for part in made:
        for piece, is_own in runs(part):
            assert not (is_own and any(letter.islower() for letter in piece)), "a caller's letter"
            assert is_own or not any(letter.isupper() for letter in piece) or not isinstance(part, TemplateText)


@given(text=words)
def test_case_changes_as_it_does_in_str(text):
    for name in ("lower", "upper", "capitalize", "title"):
        assert getattr(own_text(text), name)() == getattr(text, name)()


@pytest.mark.parametrize(
    ("template", "own"),
    [
        ("<A>{{ x }}<B>", "<A><B>"),
        ("{{ '<A>' + x + '<B>' }}", "<A><B>"),
        ("{{ '<A>' ~ x ~ 1 ~ none }}", "<A>"),
        ("{% set s = '<A>' %}{% set t %}{{ s }}{{ x }}{% endset %}{{ t | trim }}", "<A>"),
        ("{% macro m(a) %}<A>{{ a }}{% endmacro %}{{ m(x) | upper }}", "<A>"),
        ("{{ ['<A>', x, '<B>'] | join }}", "<A><B>"),
        ("{{ ['<A>', x] | join('-') }}", "<A>-"),
        ("{{ '<A>%s' | format(x) }}{{ '%s<B>' % x }}", "<A><B>"),
        ("{{ {'a': '<A>'}['a'] }}{{ {'a': ['<B>']}.a[0] }}", "<A><B>"),
        ("{{ '<A>' if x else '<B>' }}{{ y | default('<C>') }}", "<A><C>"),
        ("{{ 'q<A>q' | replace('q', x) }}{{ x.replace('q', '<A>') }}", "<A>"),
        ("{% for c in ['<A>', '<B>'] %}{{ loop.cycle('-', '+') }}{{ c }}{% endfor %}", "-<A>+<B>"),
        (
            "{% set n = namespace(t='') %}{% for i in [1, 2] %}{% set n.t = n.t + '<A>' %}{% endfor %}{{ n.t }}",
            "<A><A>",
        ),
        ("{% filter upper %}<a>{{ x }}{% endfilter %}{{ '<b>' | string | capitalize }}", "<A><b>"),
        ("{{ x | tojson }}{{ x | upper }}{{ x * 2 }}{{ x[0] }}{{ '{}'.format(x) }}{{ x | safe }}", ""),
        ("{{ '{}<A>'.format(x) }}", ""),  # what is not known to keep origins keeps none
    ],
)
def test_what_a_template_writes_is_its_own_whatever_it_does(template, own):
    """And the text is Jinja's."""
    rendered = TemplateEnvironment().from_string(template).render(x="<q>")
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = TemplateEnvironment().filters["tojson"]
    assert rendered == plain.from_string(template).render(x="<q>")
    assert "".join(text for text, is_own in runs(rendered) if is_own) == own
