"""From a traced function to something that runs: jit and its stages."""
