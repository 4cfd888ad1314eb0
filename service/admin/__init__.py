"""AdminService: settings, statistics, request timelines and KV events for operators and routers."""
