"""The command line: one file a command, flags in, tables out."""
