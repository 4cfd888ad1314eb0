"""The HTTP server: connections, TLS, middleware, and the composition of the app."""
