"""Readers of checkpoint files: they import no torch, call nothing that a file names, read no tensor."""
