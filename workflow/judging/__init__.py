"""Code that is judged: tests as they are written, and what model-written code returned."""
