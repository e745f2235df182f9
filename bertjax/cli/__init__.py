"""The commands: one module each, which reads flags, calls the library and prints."""
