"""Memory and speed on a device, planned before anything is loaded."""
