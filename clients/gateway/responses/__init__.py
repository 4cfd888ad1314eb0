"""From the service's streams to OpenAI's answers and events."""
