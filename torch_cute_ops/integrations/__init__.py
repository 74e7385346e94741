"""Support for other libraries. Each module needs its library and is imported separately."""
