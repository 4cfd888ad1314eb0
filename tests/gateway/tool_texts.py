"""A call as models write it."""

ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln", "days": [1, {"a": "}"}]}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}]',
    "pythonic": '[weather(city="Köln", days=[1, {"a": "}"}])]',
}
ARGUMENTS = '{"city": "Köln", "days": [1, {"a": "}"}]}'
