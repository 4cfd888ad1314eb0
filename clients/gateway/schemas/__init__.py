"""The schemas of requests and responses, as OpenAI documents them. No behaviour."""
