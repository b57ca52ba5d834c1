"""Making and weighing sparse plans: `semspec sparse calibrate`, `quality`, `plot`. At work they are in `sparse`."""
