"""Measuring: `lily bench`."""
