"""Steps and the calls that pack them, on workers and on this process's devices."""
