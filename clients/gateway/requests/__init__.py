"""From OpenAI's requests to the service's: bodies, prompts, sampling, tools."""
