"""Model families: wiring and weight names only. What they share is in `layers`; who they are is in `registry`."""
