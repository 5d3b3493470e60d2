"""vLLM in the processes of the user and of the engine: arguments, engine core, API server."""
