"""Models of other libraries on the ops. Each module needs its library and imports it itself."""
