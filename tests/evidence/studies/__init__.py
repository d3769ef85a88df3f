"""Small studies that the engine's tests run."""
