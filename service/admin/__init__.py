"""AdminService: settings, statistics, timelines and KV events, for operators."""
