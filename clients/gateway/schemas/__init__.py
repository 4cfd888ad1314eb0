"""The shapes of requests and answers, as OpenAI documents them. No behaviour."""
