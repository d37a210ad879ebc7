"""The suites on a GPU: the same shapes, schemes, records and figures, timed by the device's clock."""
