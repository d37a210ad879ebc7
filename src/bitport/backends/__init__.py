"""Who computes: one folder per device. See README.md here for what a backend may do."""
