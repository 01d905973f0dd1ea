"""The planner: host index, host cache, booking strategies. Decides; never writes."""
