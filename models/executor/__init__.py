"""The service's side of a worker process: how it is started, spoken to and watched. No torch."""
