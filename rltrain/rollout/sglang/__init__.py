"""SGLang as a rollout engine: a server in a process of its own, the calls to it, and how weights reach it."""
