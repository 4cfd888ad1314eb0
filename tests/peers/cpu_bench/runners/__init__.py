"""One program an engine: loads a model, says that it is ready, and runs the sets of requests that come on its stdin."""
