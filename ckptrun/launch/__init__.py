"""From a resolution to ranks that run: the plan, the launchers and the supervisor."""
