"""What fits a device, computed before anything is loaded."""
