"""The attention backward on SM90; kernel.py says which file does what."""
