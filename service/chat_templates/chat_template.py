"""The service's view of a model's chat templates. Another process renders them (``renderers``)."""

from collections.abc import Mapping

from penstock.service.chat_templates.chat_message import TemplateInput
from penstock.service.chat_templates.frames import Compiled, TemplateFailure
from penstock.service.chat_templates.renderers import DEFAULT_TIMEOUT_S, Renderers, TemplateBusy, TemplateLimit
from penstock.service.chat_templates.text import with_marks
from penstock.service.errors import Reason, ServiceError, invalid

_NOT_CONTINUABLE = (
    "chat.continue_final_message: this model's chat template does not show the last message as it is; leave it out, or "
    "send text or token_ids"
)


class TemplateError(Exception):
    """A template that cannot be used. The text gives the reason."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


def compile_templates(
    sources: Mapping[str, str], special_tokens: Mapping[str, str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, "ChatTemplate"]:
    """Returns the templates by name. ``special_tokens`` are their variables, such as ``bos_token``; ``timeout_s`` is
    the CPU time for rendering one conversation. Raises TemplateError."""
    if not sources:
        return {}
    try:
        renderers = Renderers(sources, special_tokens, timeout_s)
    except TemplateLimit as error:
        raise TemplateError(next(iter(sources)), str(error)) from None
    except TemplateBusy:
        raise TemplateError(next(iter(sources)), "could not be compiled: the machine is too busy") from None
    ready = renderers.ready
    if ready.problem:
        raise TemplateError(ready.name, ready.problem)
    return {name: ChatTemplate(name, source, ready.templates[name], renderers) for name, source in sources.items()}


class ChatTemplate:
    """A compiled template, which threads may share. It renders to ``TemplateText``, which distinguishes the template's
    own text from the caller's."""

    def __init__(self, name: str, source: str, compiled: Compiled, renderers: Renderers) -> None:
        self._name = name
        self._renderers = renderers
        self.source = source
        self.shows_tools = compiled.shows_tools
        self.roles = compiled.roles

    def render(self, chat: TemplateInput, after_answer: bool = False) -> str:
        """Returns the prompt; with ``after_answer``, the text that follows the assistant's answer in a prompt: the end
        of its turn, then the messages. Raises ServiceError if the template refuses the messages, fails on them, or does
        not show answers unchanged."""
        try:
            rendered = self._renderers.render(self._name, chat, after_answer)
        except TemplateLimit as error:
            raise invalid("chat", f"the model's chat template {error}") from None
        except TemplateBusy:
            busy = "the machine is too busy to render the conversation; try again"
            raise ServiceError(Reason.PREPARATION_FULL, busy) from None
        match rendered.failure:
            case None:
                return with_marks(rendered.text, rendered.marks)
            case TemplateFailure.REFUSED:
                raise invalid("chat", rendered.problem)
            case TemplateFailure.NOT_CONTINUABLE:
                field = "chat.continue_final_message"
                raise ServiceError(Reason.CHAT_NOT_CONTINUABLE, _NOT_CONTINUABLE, field=field)
            case TemplateFailure.ANSWER_NOT_SHOWN:
                raise ServiceError(Reason.CHAT_NOT_CONTINUABLE, field="chat")
