"""The schemas of requests and responses, as OpenAI documents them. They have no behaviour."""
