"""What backends on torch share: weights, KV pages, sampling."""
