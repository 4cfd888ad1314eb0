"""What happens when a worker fails: restarts, and finding the request that causes crashes."""
